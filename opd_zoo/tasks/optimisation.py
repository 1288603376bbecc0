"""NP-Engine's problems: hard optimisation with a generator, a verifier of feasibility, and a heuristic to compare with.

    knapsack    items under a weight limit; the value as large as can be
    tour        an order of the cities; the round trip as short as can be
    cover       nodes that touch every edge; as few as can be
    partition   numbers in one of two halves; the difference of their sums as small as can be

    score   0 if infeasible, else min(1, quality / quality of the heuristic)

Quality is the value, 1 / length, 1 / number of nodes, or 1 / (1 + difference). So an answer as good as the heuristic's
is right, a worse feasible one earns a part. An answer is the last list of numbers in brackets: items, cities, nodes, or
places of the numbers of one half. `level` sets the size, and prompts carry it as `level` for curricula (method sec or
stages by it). Source: NP-Engine, arXiv 2510.16476 (abstract: generator, verifier and heuristic solver, levels of
difficulty; it has ten problems in five domains; these four and the score are ours).
"""

import math
import re
from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field

from opd.config import Settings
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict

Kind = Literal["knapsack", "tour", "cover", "partition"]
Problem = dict[str, Any]
_LIST = re.compile(r"\[([\d,\s]*)\]")
_ASK: dict[Kind, str] = {
    "knapsack": "Items (weight, value): {items}. Pack at most weight {limit}, with the largest value.",
    "tour": "Distances between cities: {distances}. Visit every city once and return, by the shortest way.",
    "cover": "Nodes 0 to {last}, edges {edges}. Choose as few nodes as possible that touch every edge.",
    "partition": "Numbers: {numbers}. Choose some so that their sum is as near to that of the others as possible.",
}


class OptimisationOptions(Settings):
    """Size and kind of the problems."""

    kinds: list[Kind] = Field(
        default_factory=lambda: list(get_args(Kind)), min_length=1, description="Kinds to draw from."
    )
    least: int = Field(1, ge=1, le=20, description="Lowest level that is drawn.")
    most: int = Field(3, ge=1, le=20, description="Highest level that is drawn; a level adds two items.")


class Optimisation:
    """Optimisation problems, scored against a heuristic (NP-Engine).

    `Prompt.extra` holds the problem, the heuristic's quality and the level.
    """

    Options: ClassVar[type[Settings]] = OptimisationOptions

    def __init__(self, options: OptimisationOptions) -> None:
        self.options = options

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        o = self.options
        kind, level = random.choice(o.kinds), random.randint(o.least, max(o.least, o.most))
        problem = drawn(kind, 3 + 2 * level, random)
        best = heuristic(problem)
        shown = {key: str(value) for key, value in problem.items()} | {"last": str(problem["size"] - 1)}
        text = f"{_ASK[kind].format(**shown)} Answer with a list of indices from 0, for example [0, 2].\n"
        extra = {"problem": problem, "quality": quality(problem, best), "level": level}
        return Prompt.make(text, answer=str(best), domain=kind, extra=extra)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Score the last list in the completion."""
        said = self.extract(prompt, completion)
        if said is None:
            return Verdict.of(False, "there is no list of indices")
        found = quality(prompt.extra["problem"], [int(one) for one in said.split()])
        if not found:
            return Verdict.of(False, f"[{said}] is not feasible")
        return Verdict.score(found / prompt.extra["quality"] + 1e-12)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The last list of a completion, as indices with spaces; in order of size unless the order matters."""
        found = _LIST.findall(completion)
        if not found:
            return None
        indices = [int(one) for one in re.findall(r"\d+", found[-1])]
        ordered = indices if prompt.extra["problem"]["kind"] == "tour" else sorted(indices)
        return " ".join(map(str, ordered))

    def labels(self) -> Labels:
        """All problems have the domains of their kinds and no teacher."""
        return frozenset((None, kind) for kind in self.options.kinds)

    def close(self) -> None:
        """Nothing to release."""


def drawn(kind: Kind, size: int, random: Random) -> Problem:
    """A problem with `size` items."""
    found: Problem = {"kind": kind, "size": size}
    if kind == "knapsack":
        found["items"] = [(random.randint(1, 9), random.randint(1, 20)) for _ in range(size)]
        found["limit"] = sum(weight for weight, _ in found["items"]) // 2 + 1
    elif kind == "tour":
        places = [(random.random(), random.random()) for _ in range(size)]
        found["distances"] = [[round(100 * math.dist(a, b)) for b in places] for a in places]
    elif kind == "cover":
        pairs = list(combinations(range(size), 2))
        found["edges"] = sorted(random.sample(pairs, min(len(pairs), size + size // 2)))
    else:
        found["numbers"] = [random.randint(1, 50) for _ in range(size)]
    return found


def quality(problem: Problem, chosen: Sequence[int]) -> float:
    """How good an answer is, above 0; 0 if it is not feasible."""
    size = problem["size"]
    if len(set(chosen)) != len(chosen) or any(not 0 <= one < size for one in chosen):
        return 0.0
    match problem["kind"]:
        case "knapsack":
            picked = [problem["items"][one] for one in chosen]
            return float(sum(v for _, v in picked)) if sum(w for w, _ in picked) <= problem["limit"] else 0.0
        case "tour":
            way = [problem["distances"][a][b] for a, b in zip(chosen, [*chosen[1:], *chosen[:1]], strict=True)]
            return 1.0 / max(1, sum(way)) if len(chosen) == size else 0.0
        case "cover":
            touched = all(a in chosen or b in chosen for a, b in problem["edges"])
            return 1.0 / max(1, len(chosen)) if touched else 0.0
        case _:
            numbers = problem["numbers"]
            return 1.0 / (1.0 + abs(sum(numbers) - 2 * sum(numbers[one] for one in chosen)))


def heuristic(problem: Problem) -> list[int]:
    """The greedy answer: by value per weight, to the nearest city, by open edges, or to the smaller half."""
    size, found = problem["size"], [0] if problem["kind"] == "tour" else []
    match problem["kind"]:
        case "knapsack":
            items, left = problem["items"], problem["limit"]
            for one in sorted(range(size), key=lambda i: (-items[i][1] / items[i][0], i)):
                if items[one][0] <= left:
                    found.append(one)
                    left -= items[one][0]
        case "tour":
            while len(found) < size:
                here = problem["distances"][found[-1]]
                found.append(min((one for one in range(size) if one not in found), key=lambda i: (here[i], i)))
            return found
        case "cover":
            open_ = list(problem["edges"])
            while open_:
                found.append(max(range(size), key=lambda i: (sum(i in pair for pair in open_), -i)))
                open_ = [pair for pair in open_ if found[-1] not in pair]
        case _:
            sums, numbers = [0, 0], problem["numbers"]
            for one in sorted(range(size), key=lambda i: (-numbers[i], i)):
                half = int(sums[1] < sums[0])
                sums[half] += numbers[one]
                found += [one] * (half == 0)
    return sorted(found)
