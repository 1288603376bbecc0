"""The calls that a rollout server must support; `vllm` and `sglang` implement them for each kind of server."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from student.rollout.servers.http import Connection

if TYPE_CHECKING:
    from student.rollout.servers.held import HeldWeights

PARTIAL = "partial"
"""Label of a server while it loads weights; if loading stops halfway, the server holds no version at all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A row to sample.

    Attributes:
        prompt: ids to continue.
        limit: maximum number of tokens to sample.
        temperature: divides the logits; 0 is greedy.
        stops: ids that end the row; the one that does is kept as its last token.
        seed: seed from the row's own random stream, below 2^31.
        top: number of most likely ids to return at each position.
        barred: ids that are never drawn, because they are padding rows of the head; valid ids are those below.
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
        ids: the tokens, including the one that ended the row.
        logp: log-prob of each token at the row's temperature, nats.
        top: for each position, ids in descending order of probability.
        top_logp: their log-probs, nats.
        weights: labels of the weights that sampled it; more than one if they were replaced meanwhile.
        whole: False if the server aborted the row before it ended.
    """

    ids: list[int]
    logp: list[float]
    top: list[list[int]]
    top_logp: list[list[float]]
    weights: tuple[str, ...]
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server reports about itself.

    Attributes:
        longest: maximum tokens of prompt and response together.
        most_likely: the largest `Ask.top` that it supports.
        wrong: a sentence saying why the server cannot be used and what to change; "" if it can.
        version: its version.
        most_barred: the most ids of `Ask.barred` that it supports.
    """

    longest: int
    most_likely: int
    wrong: str = ""
    version: str = ""
    most_barred: int = 2**31


class Dialect(Protocol):
    """The calls of one kind of server.

    Attributes:
        engine: its name in `opd.engine_versions`.
        receives: whether `receive` is supported.
    """

    engine: ClassVar[str]
    receives: ClassVar[bool]

    def facts(self, connection: Connection, *, adapters: bool, nccl: bool) -> Facts:
        """What the server reports; `adapters` and `nccl` say if it will be sent adapters, or weights over NCCL."""

    def holds(self, connection: Connection, *, adapters: bool) -> frozenset[str]:
        """Labels of the weights with which the server can sample."""

    def load(self, connection: Connection, folder: Path, label: str) -> None:
        """Replace the weights by those in `folder` once the server's rows are done, and drop cached keys and values."""

    def receive(self, connection: Connection, weights: "HeldWeights", label: str) -> None:
        """As `load`, with weights that this process sends over NCCL."""

    def load_adapter(self, connection: Connection, folder: Path, label: str, old: frozenset[str]) -> None:
        """Load an adapter, and unload those labelled `old`."""

    def generate(self, connection: Connection, ask: Ask, *, adapters: bool) -> Answer:
        """Sample a row."""


def most_bytes(ask: Ask) -> int:
    """Largest answer to a row that is read, in bytes: several times what both kinds of server send."""
    return 2**20 + 512 * ask.limit * (1 + ask.top)


def barred(ids: range) -> Mapping[str, Any]:
    """The request field that keeps ids from being drawn, the same for both kinds of server."""
    return {"logit_bias": {str(token): -100.0 for token in ids}} if ids else {}
