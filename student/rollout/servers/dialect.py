"""What a rollout server is asked for, whichever it is; `vllm` and `sglang` say how."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from student.rollout.servers.http import Connection

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

PARTIAL = "partial"
"""Label of a server while it loads: if loading stops halfway, it holds no version at all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A row to sample.

    Attributes:
        prompt: ids to continue.
        limit: most tokens.
        temperature: 0 is greedy.
        stops: ids that end the row, kept as its last.
        seed: of the row's own stream, below 2^31.
        top: how many of the most likely ids to give at each position.
        barred: ids that are never drawn: rows of the head that belong to no token.
        weights: label of the weights to sample with.
    """

    prompt: list[int]
    limit: int
    temperature: float
    stops: list[int]
    seed: int
    top: int
    barred: range
    weights: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A sampled row.

    Attributes:
        ids: tokens, the one that ended it included.
        logp: of each, at the row's temperature, nats.
        top: for each position, ids by falling probability.
        weights: labels of the weights that sampled it, one unless they were replaced meanwhile.
        whole: False when the server gave the row up before it ended.
    """

    ids: list[int]
    logp: list[float]
    top: list[list[int]]
    weights: tuple[str, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself.

    Attributes:
        longest: most tokens of prompt and response together.
        most_likely: largest `Ask.top`.
        wrong: why it cannot be used, a sentence with what to change; "" when it can.
    """

    longest: int
    most_likely: int
    wrong: str = ""


class Dialect(Protocol):
    """How one kind of server is asked.

    Attributes:
        receives: whether it has `receive`.
    """

    receives: ClassVar[bool]

    def facts(self, connection: Connection, *, adapters: bool, nccl: bool) -> Facts:
        """What the server says of itself; `adapters`, `nccl`: whether it will be sent adapters, weights over NCCL."""

    def holds(self, connection: Connection, *, adapters: bool) -> frozenset[str]:
        """Labels of the weights that it can sample with now."""

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        """Replace the weights by those in `folder`, once its rows are done, and drop keys and values of old ones."""

    def receive(self, connection: Connection, weights: "HeldWeights", label: str) -> None:
        """As `load`, of weights that this process sends over NCCL."""

    def load_adapter(self, connection: Connection, folder: Path, label: str, old: frozenset[str]) -> None:
        """Take an adapter in, and those labelled `old` out."""

    def generate(self, connection: Connection, ask: Ask, *, adapters: bool) -> Answer:
        """Sample a row."""


def barred(ids: range) -> Mapping[str, Any]:
    """The field that keeps ids from being drawn, in both dialects."""
    return {"logit_bias": {str(token): -100.0 for token in ids}} if ids else {}
