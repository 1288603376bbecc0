"""The tensors of a micro-batch: what the model reads, and what a term computes its loss from.

Shapes: N positions, B sequences of padded length L, P prompt and T response tokens of a row, K candidate ids, H hidden
width, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from opd.errors import PluginError
from opd.wire.types import PayloadKind
from student.data.hooks import Reading
from student.data.needs import TEACHER
from student.data.prefixes import Prefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from numpy.typing import NDArray
    from torch import Tensor

    from opd.heads import OutputHead
    from opd.maths import TokenScores
    from student.data.row import Row

T = TypeVar("T")


class UndeclaredError(PluginError):
    """A term reads `what`, which the batch lacks, because no term declares it in its `needs`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the batch has no {what}; name it in the needs of the term.")
        self.what = what


def have(value: T | None, what: str) -> T:
    """Return `value`; UndeclaredError, naming `what`, if it is None because the term did not ask for it in `needs`."""
    if value is None:
        raise UndeclaredError(what)
    return value


@dataclass(frozen=True, slots=True, eq=False)
class StudentTokens:
    """The student's distribution at N positions, at the training temperature; what no term needs is None.

    Attributes:
        scores: log-prob of the response token, log-probs at the student's candidates (K = 0 if none were kept), log
            mass outside the candidates, and entropy; nats, with gradient.
        scores_at_teacher: the same, with the teacher's top-k ids in place of the candidates.
        hidden: [N, H] final hidden states, with gradient; `head` turns them into logits.
        head: the student's output head, with gradient.
    """

    scores: TokenScores | None = None
    scores_at_teacher: TokenScores | None = None
    hidden: Float[Tensor, "n h"] | None = None
    head: OutputHead | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SignalTokens:
    """What a model that scores rows says at N positions; float32, nats; None where the payload does not carry it.

    Attributes:
        sampled: [N] log-prob of the response token; of a teacher with another tokenizer, its share of its span's.
        values: [N, K] log-probs at `ids`.
        ids: [N, K] int64, the ids that the payload is about.
        log_tail: [N] log of the probability mass outside `ids`.
        hidden: [N, H] final hidden states of the model; `head` turns them into logits.
        head: the model's output head.
        logits: [N, V] logits over the whole vocabulary.
        span: [N] int64, the position in the batch at which the token's span begins; -1 for tokens without a signal;
            None if every token is a span of its own.
    """

    sampled: Float[Tensor, " n"] | None = None
    values: Float[Tensor, "n k"] | None = None
    ids: Int[Tensor, "n k"] | None = None
    log_tail: Float[Tensor, " n"] | None = None
    hidden: Float[Tensor, "n h"] | None = None
    head: OutputHead | None = None
    logits: Float[Tensor, "n v"] | None = None
    span: Int[Tensor, " n"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TeacherShare:
    """One of several teachers that score the same rows and whose divergences are summed.

    Attributes:
        weight: weight of its divergence in the sum; the weights of a batch sum to 1.
        signals: its payloads under role "teacher", and those of all other roles.
        student: the student's distribution; `scores_at_teacher` is at this teacher's ids.
    """

    weight: float
    signals: Mapping[tuple[str, PayloadKind], SignalTokens]
    student: StudentTokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """A micro-batch: its N response positions, flattened row after row, and the B sequences that the model reads.

    A row is one sequence, except that an episode of several windows has one for each. `collate` lays the rows out;
    student, signals and shares come from the forward pass (`student.learning.layout`).

    Attributes:
        token_ids: [N] int64, response tokens.
        mask: [N] bool, True where the term trains on the token.
        weights: [N] float32, weight of each position in the term's mean over the update; 0 where masked.
        row: [N] int64, index into `rows`.
        position: [N] int64, index t within the response.
        behaviour_logp: [N] float32, log-prob of the response token under the sampler, nats.
        candidates: [N, K] int64, the student's candidates at rollout, or None if none were kept.
        student: the student's distribution under the current weights.
        signals: signals of the models that scored the rows, by (role, payload kind).
        shares: the teachers whose divergences are summed, if there are several; `signals` then has none of them.
        rows: the rows, for facts about a whole row.
        temperature: divides the student's logits.
        valid_vocab: number of vocabulary rows that are real tokens; divergences leave out the padding after them.
        input_ids: [B, L] int64, right-padded with 0.
        attention_mask: [B, L] int64.
        sequence: [N] int64, sequence of each response position.
        source: [N] int64, column whose hidden state predicts the position's token (P + t - 1).
        prefixes: what sequences share and the model reads once; `input_ids` is then what follows, while `source` still
            counts from the beginning. None if sequences are read whole.
    """

    token_ids: Int[Tensor, " n"]
    mask: Bool[Tensor, " n"]
    weights: Float[Tensor, " n"]
    row: Int[Tensor, " n"]
    position: Int[Tensor, " n"]
    behaviour_logp: Float[Tensor, " n"]
    candidates: Int[Tensor, "n k"] | None
    rows: Sequence[Row]
    student: StudentTokens = StudentTokens()
    signals: Mapping[tuple[str, PayloadKind], SignalTokens] = field(default_factory=dict)
    shares: tuple[TeacherShare, ...] = ()
    valid_vocab: int = 0
    temperature: float = 1.0
    input_ids: Int[Tensor, "b l"] | None = None
    attention_mask: Int[Tensor, "b l"] | None = None
    sequence: Int[Tensor, " n"] | None = None
    source: Int[Tensor, " n"] | None = None
    prefixes: Prefixes | None = None

    def reading(self, update: int) -> Reading:
        """The description, for hooks, of its forward pass in optimizer update number `update`."""
        every = [(row, place, window) for row in self.rows for place, window in enumerate(row.sequences)]
        return Reading(
            "update",
            tuple(None if row.windows else row for row, _, _ in every),
            max(row.longest for row in self.rows),
            tuple(f"{row.key} {place}" for row, place, _ in every),
            tuple(len(row.prompt_ids) + end - since for row, _, (since, _, end) in every),
            update,
        )

    def of_rows(self, values: Sequence[float]) -> Float[Tensor, " n"]:
        """Spread one value per row over the row's positions: [N], bool if the values are."""
        import torch

        return torch.tensor(values, device=self.mask.device)[self.row]

    def of_tokens(self, values: Sequence[float | NDArray[np.float32]]) -> Float[Tensor, " n"]:
        """Concatenate one array [T] per row, or one number for all tokens of a row: [N] float32."""
        import torch

        parts = [np.broadcast_to(np.float32(v), row.length) for v, row in zip(values, self.rows, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(self.mask.device)

    def signal(self, kind: PayloadKind, role: str = TEACHER) -> SignalTokens:
        """The signal of `role` with payload `kind`; for SAMPLED, gather or top-k serve too, as both carry it.

        Raises:
            UndeclaredError: if no term declares it.
        """
        kinds = (kind, PayloadKind.GATHER, PayloadKind.TOPK) if kind is PayloadKind.SAMPLED else (kind,)
        signals = (self.signals[role, able] for able in kinds if (role, able) in self.signals)
        return have(next(signals, None), f"{kind} from the {role}")
