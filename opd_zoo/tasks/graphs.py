"""G1's graphs: questions about random graphs, with exact answers.

    edge        is there an edge between two nodes                         yes or no
    degree      the degree of a node                                       a number
    connected   is there a path between two nodes                          yes or no
    distance    the length of a shortest path between two connected nodes  a number
    components  the number of connected components                         a number
    triangles   the number of triangles                                    a number
    bipartite   can the nodes be coloured with two colours                 yes or no
    cycle       is there a cycle                                           yes or no
    matching    the size of a largest matching                             a number
    colours     the least number of colours of a proper colouring          a number

The last two are hard in general and solved by search here, so graphs have at most 12 nodes. An answer is the last
number, or the last yes or no, of a completion. The domain of a problem is its kind. Source: G1, arXiv 2505.18499
(abstract: graph-theoretic tasks with exact checkers; it has 50, of which these are in the spirit, not the words).
"""

import re
from collections.abc import Callable
from itertools import combinations
from random import Random
from typing import ClassVar, Literal, get_args

from pydantic import Field

from opd.config import Settings
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict

Kind = Literal[
    "edge",
    "degree",
    "connected",
    "distance",
    "components",
    "triangles",
    "bipartite",
    "cycle",
    "matching",
    "colours",
]
Edges = list[tuple[int, int]]
_LAST = re.compile(r"\byes\b|\bno\b|(?<!\d)\d+", re.IGNORECASE)


class GraphsOptions(Settings):
    """Size and kind of the problems."""

    kinds: list[Kind] = Field(
        default_factory=lambda: list(get_args(Kind)), min_length=1, description="Kinds to draw from."
    )
    nodes: int = Field(6, ge=3, le=12, description="Number of nodes.")
    density: float = Field(0.35, gt=0, lt=1, description="Probability of an edge between two nodes.")


class Graphs:
    """Questions about random graphs with exact answers (G1).

    `Prompt.extra` holds the kind.
    """

    Options: ClassVar[type[Settings]] = GraphsOptions

    def __init__(self, options: GraphsOptions) -> None:
        self.options = options

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        o = self.options
        edges = [pair for pair in combinations(range(o.nodes), 2) if random.random() < o.density]
        kind = random.choice(o.kinds)
        a, b = sorted(random.sample(range(o.nodes), 2))
        if kind == "distance":
            # A distance is asked where there is one; in a graph without edges it becomes a question about one.
            edges = edges or [(a, b)]
            near = [pair for pair in combinations(range(o.nodes), 2) if distance(edges, *pair)]
            a, b = random.choice(near)
        question, answer = _QUESTIONS[kind]
        listed = " ".join(f"{i}-{j}" for i, j in edges) or "none"
        text = f"Nodes 0 to {o.nodes - 1}. Edges: {listed}. {question.format(a=a, b=b)}\n"
        found = answer(edges, o.nodes, a, b)
        told = ("yes" if found else "no") if isinstance(found, bool) else str(found)
        return Prompt.make(text, answer=told, domain=kind, extra={"kind": kind})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Compare the last number, yes or no of the completion with the answer."""
        said = self.extract(prompt, completion)
        return Verdict.of(said == prompt.answer, f"the answer is {prompt.answer}, not {said}")

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The last number, yes or no of a completion."""
        found = _LAST.findall(completion)
        return (str(int(found[-1])) if found[-1].isdecimal() else found[-1].lower()) if found else None

    def labels(self) -> Labels:
        """All problems have the domains of their kinds and no teacher."""
        return frozenset((None, kind) for kind in self.options.kinds)

    def close(self) -> None:
        """Nothing to release."""


def reached(edges: Edges, start: int) -> dict[int, int]:
    """The nodes connected to `start`, each with its distance from it."""
    found, front = {start: 0}, [start]
    for node in front:
        for i, j in edges:
            other = j if i == node else i if j == node else None
            if other is not None and other not in found:
                found[other] = found[node] + 1
                front.append(other)
    return found


def distance(edges: Edges, a: int, b: int) -> int:
    """The length of a shortest path between two different nodes; 0 if there is none."""
    return reached(edges, a).get(b, 0)


def components(edges: Edges, nodes: int) -> int:
    """The number of connected components."""
    return len({frozenset(reached(edges, node)) for node in range(nodes)})


def matching(edges: Edges) -> int:
    """The size of a largest set of edges without a common node."""
    if not edges:
        return 0
    (i, j), rest = edges[0], edges[1:]
    return max(matching(rest), 1 + matching([pair for pair in rest if i not in pair and j not in pair]))


def colourable(edges: Edges, nodes: int, colours: int, known: tuple[int, ...] = ()) -> bool:
    """Whether the nodes can be coloured so that no edge joins equal colours, given those of the first nodes."""
    node = len(known)
    if node == nodes:
        return True
    near = {known[i] for i, j in edges if j == node and i < node}
    # Colours are alike, so of those that are not in use yet a node needs to try only the first.
    most = min(colours, max(known, default=-1) + 2)
    return any(colourable(edges, nodes, colours, (*known, c)) for c in range(most) if c not in near)


_QUESTIONS: dict[Kind, tuple[str, Callable[[Edges, int, int, int], int | bool]]] = {
    "edge": ("Is there an edge between {a} and {b}?", lambda e, n, a, b: (a, b) in e),
    "degree": ("What is the degree of node {a}?", lambda e, n, a, b: sum(a in pair for pair in e)),
    "connected": ("Is there a path from {a} to {b}?", lambda e, n, a, b: b in reached(e, a)),
    "distance": ("How long is a shortest path from {a} to {b}?", lambda e, n, a, b: distance(e, a, b)),
    "components": ("How many connected components are there?", lambda e, n, a, b: components(e, n)),
    "triangles": (
        "How many triangles are there?",
        lambda e, n, a, b: sum({(i, j), (j, k), (i, k)} <= set(e) for i, j, k in combinations(range(n), 3)),
    ),
    "bipartite": ("Is the graph bipartite?", lambda e, n, a, b: colourable(e, n, 2)),
    "cycle": ("Is there a cycle?", lambda e, n, a, b: len(e) > n - components(e, n)),
    "matching": ("How many edges has a largest matching?", lambda e, n, a, b: matching(e)),
    "colours": (
        "How many colours does a proper colouring need at least?",
        lambda e, n, a, b: next(c for c in range(1, n + 1) if colourable(e, n, c)),
    ),
}
