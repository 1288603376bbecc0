"""Graphs: every answer agrees with one found by brute force, and only the last word or number counts."""

from itertools import combinations, pairwise, permutations, product
from random import Random
from typing import Any, get_args

import pytest

from opd.config import parse_settings
from opd_zoo.tasks.graphs import Graphs, Kind


def brute(kind: str, n: int, edges: list[tuple[int, int]], a: int, b: int) -> Any:
    linked = {frozenset(edge) for edge in edges}
    paths = [
        way
        for size in range(2, n + 1)
        for way in permutations(range(n), size)
        if way[0] == a and way[-1] == b and all({x, y} in linked for x, y in pairwise(way))
    ]
    colours = [c for c in product(range(n), repeat=n) if all(c[i] != c[j] for i, j in edges)] if n < 6 else []
    subsets = [s for size in range(len(edges) + 1) for s in combinations(edges, size)]

    def joined(i: int, j: int, seen: frozenset[int] = frozenset()) -> bool:
        return i == j or any(joined(k, j, seen | {i}) for k in range(n) if {i, k} in linked and k not in seen | {i})

    match kind:
        case "edge":
            return {a, b} in linked
        case "degree":
            return sum({a, x} in linked for x in range(n))
        case "connected":
            return bool(paths)
        case "distance":
            return min(map(len, paths)) - 1
        case "components":
            return len({tuple(joined(i, j) for j in range(n)) for i in range(n)})
        case "triangles":
            return sum(all({x, y} in linked for x, y in combinations(t, 2)) for t in combinations(range(n), 3))
        case "bipartite":
            return any(len(set(c)) <= 2 for c in colours)
        case "cycle":
            rings = (w for size in range(3, n + 1) for w in permutations(range(n), size))
            return any(all({x, y} in linked for x, y in zip(w, (*w[1:], w[0]), strict=True)) for w in rings)
        case "matching":
            return max(len(s) for s in subsets if len({x for edge in s for x in edge}) == 2 * len(s))
        case _:
            return min(len(set(c)) for c in colours)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_answers_agree_with_brute_force(kind: str) -> None:
    task = Graphs(parse_settings(Graphs.Options, {"kinds": [kind], "nodes": 5, "density": 0.4}))
    answers = set()
    for seed in range(25):
        prompt = task.draw(Random(seed))
        assert prompt.text is not None and prompt.domain == kind
        listed = prompt.text.split("Edges: ")[1].split(".")[0]
        edges = [] if listed == "none" else [tuple(map(int, pair.split("-"))) for pair in listed.split()]
        asked = [int(word) for word in prompt.text.split(". ")[-1].replace("?", " ").split() if word.isdigit()]
        a, b = [*asked, 0, 0][:2]
        found = brute(kind, 5, edges, a, b)  # type: ignore[arg-type]
        told = ("yes" if found else "no") if isinstance(found, bool) else str(found)
        assert prompt.answer == told, prompt.text
        assert task.verify(prompt, f"Maybe 77 or no. It is {told.upper()}.").value == 1.0
        assert task.verify(prompt, f"{told}, no, 99").value == 0.0 and task.verify(prompt, "?").value == 0.0
        answers.add(told)
    assert len(answers) > 1
