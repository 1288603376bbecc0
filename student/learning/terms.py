"""What an objective is made of: terms over the trained tokens of a micro-batch.

A term sees tensors flattened over the micro-batch's trained positions and returns one loss per position; the
objective owns weights, masks and denominators. Legend of shapes: N positions, K candidates, H hidden width, V
vocabulary rows, R rows of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import Field

from opd.config import Settings
from opd.errors import PluginError, short
from opd.registry import Registry
from opd.wire.types import PayloadKind
from student.learning.schedule import WeightSchedule
from student.scoring.needs import TEACHER, Needs

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from jaxtyping import Bool, Float, Int
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from opd.heads import OutputHead
    from opd.maths import TokenScores
    from student.controllers import StepReport
    from student.data.outcome import Outcome
    from student.data.row import Row
    from student.learning.hooks import ModelHook
    from student.learning.model import Student
    from student.recipe import Recipe

OBJECTIVES = Registry("objective", "opd.objectives", member="settings_type")
T = TypeVar("T")


def have(value: T | None, what: str) -> T:
    """`value`, which a term asked for in its `needs`.

    Raises:
        ValueError: when it is None, because the term did not ask.
    """
    if value is None:
        raise ValueError(f"batch carries no {what}; name it in the needs of the term.")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class StudentTokens:
    """The student's distribution at N positions, at the training temperature; None where no term asked.

    Attributes:
        scores: log-prob of the response token, log-probs at the student's candidates (K = 0 when none were kept), log
            tail and entropy, nats.
        scores_at_teacher: the same at the teacher's top-k ids.
        hidden: [N, H] final hidden states, with gradient; used with `head`.
        head: the student's head, with gradient.
    """

    scores: TokenScores | None = None
    scores_at_teacher: TokenScores | None = None
    hidden: Float[Tensor, "n h"] | None = None
    head: OutputHead | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SignalTokens:
    """A served model's signal at N positions, float32, nats; None where the payload does not carry it.

    Attributes:
        sampled: [N] log-prob of the response token.
        values: [N, K] log-probs at `ids`.
        ids: [N, K] int64.
        log_tail: [N] log mass outside the ids.
        hidden: [N, H] hidden states; used with `head`.
        head: the served model's head.
        logits: [N, V].
    """

    sampled: Float[Tensor, " n"] | None = None
    values: Float[Tensor, "n k"] | None = None
    ids: Int[Tensor, "n k"] | None = None
    log_tail: Float[Tensor, " n"] | None = None
    hidden: Float[Tensor, "n h"] | None = None
    head: OutputHead | None = None
    logits: Float[Tensor, "n v"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TeacherShare:
    """One of several teachers whose divergences are summed.

    Attributes:
        weight: of its divergence; the weights of a batch sum to 1.
        signals: its payloads as the signals of role "teacher", with those of the other roles.
        student: the student's distribution, at this teacher's ids where they matter.
    """

    weight: float
    signals: Mapping[tuple[str, PayloadKind], SignalTokens]
    student: StudentTokens


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """The trained positions of a micro-batch, flattened row after row.

    Attributes:
        token_ids: [N] int64, response tokens.
        mask: [N] bool, True where the token is trained on.
        weights: [N] float32, weight of each position in the term's mean over the whole step; 0 where masked.
        row: [N] int64, index into `rows`.
        position: [N] int64, index t within the response.
        behaviour_logp: [N] float32 nats, log-prob under the sampler.
        candidates: [N, K] int64, the student's candidates at rollout, or None.
        student: the student's distribution now.
        signals: served models by (role, payload kind).
        shares: the teachers whose divergences are summed, where there are several; `signals` has none of them then.
        rows: the rows, for row-level facts.
        temperature: divides the student's logits.
        valid_vocab: number of vocabulary rows that carry real tokens; divergences mask the rest.
    """

    token_ids: Int[Tensor, " n"]
    mask: Bool[Tensor, " n"]
    weights: Float[Tensor, " n"]
    row: Int[Tensor, " n"]
    position: Int[Tensor, " n"]
    behaviour_logp: Float[Tensor, " n"]
    candidates: Int[Tensor, "n k"] | None
    student: StudentTokens
    signals: Mapping[tuple[str, PayloadKind], SignalTokens]
    rows: Sequence[Row]
    valid_vocab: int
    temperature: float = 1.0
    shares: tuple[TeacherShare, ...] = ()

    def of_rows(self, values: Sequence[float]) -> Float[Tensor, " n"]:
        """[N] the value of each position's row, from one value per row; bools stay bools."""
        import torch

        return torch.tensor(values, device=self.mask.device)[self.row]

    def of_tokens(self, values: Sequence[float | NDArray[np.float32]]) -> Float[Tensor, " n"]:
        """[N] float32, from one number or one array [T] per row."""
        import torch

        parts = [np.broadcast_to(np.float32(v), row.length) for v, row in zip(values, self.rows, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(self.mask.device)

    def signal(self, kind: PayloadKind, role: str = TEACHER) -> SignalTokens:
        """The signal of `role` with payload `kind`; sampled log-probs also come with top-k and gather."""
        if kind is PayloadKind.SAMPLED and (role, kind) not in self.signals:
            kind = PayloadKind.GATHER if (role, PayloadKind.GATHER) in self.signals else PayloadKind.TOPK
        return self.signals[role, kind]


@dataclass(frozen=True, slots=True, eq=False)
class TermOutput:
    """What a term computed: either `loss` or `total`.

    Attributes:
        loss: [N] loss per position, nats, with gradient; masked positions are ignored by the objective.
        total: scalar, the sum of the losses times `TokenBatch.weights`, for kernels that take weights.
        metrics: name -> (numerator, denominator), summed over micro-batches and ranks before the division.
    """

    loss: Float[Tensor, " n"] | None = None
    total: Float[Tensor, ""] | None = None
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


def losses_of(term: Term, batch: TokenBatch) -> TermOutput:
    """What `term` computes on `batch`: sum_i w_i D_i where divergences to several teachers are summed.

    Each D_i is the term on a batch with teacher i alone; a term that needs no teacher is computed once.

    Returns:
        Loss per position or weighted total, nats; metrics are means over the teachers with the same weights.
    """
    if not batch.shares or not term.needs().teacher:
        return _checked(term, batch)
    loss: Tensor | None = None
    total: Tensor | None = None
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
    for share in batch.shares:
        # Totals carry the weight already, because they are sums with the weights that the batch gives.
        alone = replace(
            batch, signals=share.signals, student=share.student, weights=batch.weights * share.weight, shares=()
        )
        output = _checked(term, alone)
        if output.loss is not None:
            part = output.loss * share.weight
            loss = part if loss is None else loss + part
        if output.total is not None:
            total = output.total if total is None else total + output.total
        for name, (top, bottom) in output.metrics.items():
            old = metrics.get(name, (0.0, 0.0))
            metrics[name] = (old[0] + top * share.weight, old[1] + bottom * share.weight)
    return TermOutput(loss, total, metrics)


def _checked(term: Term, batch: TokenBatch) -> TermOutput:
    """What a term gives for a batch; a loss of another shape would be spread over all positions without a word."""
    output = term.token_losses(batch)
    if not isinstance(output, TermOutput):
        raise PluginError(f"{type(term).__name__} gave a {type(output).__name__}; token_losses returns a TermOutput.")
    loss, name = output.loss, type(term).__name__
    if loss is not None and (not hasattr(loss, "requires_grad") or loss.shape != batch.mask.shape):
        of = f"loss of shape {list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise PluginError(
            f"{name} gave a {of} for {len(batch.mask)} positions; it is a tensor, one number per position."
        )
    for metric, pair in output.metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise PluginError(f"{name} gave metric {metric!r} as {short(pair)}; give it as (numerator, denominator).")
    return output


AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "turn_mean", "constant", "balanced")


class TermSettings(Settings):
    """Settings that every term has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""
    weight: float | WeightSchedule = 1.0
    """Multiplies the term's loss: a number, or a schedule {from: 0, to: 0.1, steps: 100}."""
    aggregation: str = "token_mean"
    """How positions are averaged: token_mean (over all trained tokens of the update), sequence_mean (tokens of a
    response first, then responses), prompt_mean (tokens of all responses to a prompt first, then prompts), turn_mean
    (tokens of a turn of an episode first, then turns), constant (sum divided by responses times the length limit: a
    truncated response keeps exactly the gradients of its tokens), or balanced (token mean within each of `strata`,
    which weigh by their number of responses). An estimate from the sampled token that is unbiased at its position
    stays unbiased over responses with constant alone: means divide by lengths, which depend on the sampled tokens.
    token_mean is biased by about 1 / rows of the step (5 % at 4 rows, 0.3 % at 64 in docs/estimators.md),
    sequence_mean by more (29 % with payload sampled, 11 % with gather), whatever the number of rows."""
    strata: str = "domain"
    """What aggregation balanced keeps apart: domain, teacher, or the name of a tag of the rows; in policy losses also
    credit, the sign of the advantage."""
    rows: Literal["all", "sampled", "expert"] = "all"
    """Which rows the term learns from and averages over: all, those that the student sampled under the prompt that they
    are trained under, or all others (see method expert_rows)."""
    first_turns: int | None = Field(None, ge=1)
    """Only the first so many turns of an episode are learnt from and averaged over; null for all."""


class Term:
    """A term of the objective. Subclasses set `settings_type` and implement `needs` and `token_losses`.

    Attributes:
        label: its name in metrics, numbered by the objective where several terms have one name.
        repeats: whether an earlier term of the objective has the same name; all its metrics begin with the label then.
    """

    settings_type: ClassVar[type[TermSettings]] = TermSettings
    sums_teachers: ClassVar[bool] = False
    """Whether the weighted sum of the losses to several teachers means something: true of divergences."""

    ranks_tokens: ClassVar[bool] = False
    """Whether what a token weighs depends on the other tokens of its response, so that a shorter response is not a part
    of a longer one."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.label = str(settings.name).rpartition(":")[2]
        self.repeats = False

    @property
    def recomputes(self) -> bool:
        """Whether signals of role "student" are read again before every update but the first of a step."""
        return False

    @property
    def why_not_stale(self) -> str:
        """Why the term cannot learn from rows that weights of earlier steps sampled, a clause; "" where it can.

        It can where its loss, given the prefix, does not depend on who drew the token, or is weighted with
        p(y) / behaviour(y), bounded or not.
        """
        if self.settings.rows == "expert":
            return ""
        return "it takes what was sampled for the student's own, and has no importance weight"

    @property
    def takes_given(self) -> bool:
        """Whether it can learn from rows that the student did not sample, where `rows` admits such."""
        return True

    def needs(self) -> Needs:
        """What the term needs; the loop refuses a run whose fleet cannot serve it."""
        return Needs()

    def check(self, recipe: Recipe) -> None:
        """Look at the whole recipe before anything is loaded, also in a dry run.

        Raises:
            ConfigError: when the term cannot learn in it.
        """

    def remarks(self, recipe: Recipe) -> list[str]:
        """Advice to log on a recipe that is valid but may not do what its author expects, one clause each.

        Here, that later updates of a step learn from rows of older weights, where the term does not go with them.
        """
        updates = recipe.train.epochs * recipe.train.minibatches
        if updates == 1 or not self.why_not_stale:
            return []
        return [
            f"of {updates} updates per batch all but the first learn from rows of older weights, which term "
            f"{self.settings.name!r} does not go with: {self.why_not_stale}; or make one update"
        ]

    def bind(self, tokenizer: Any) -> None:
        """Called once before the first step with the student's tokenizer."""

    def module(self, student: Student) -> tuple[nn.Module, float] | None:
        """Weights of the term's own, which are trained with the student's, and their learning rate at its peak.

        Called once, before the optimizer is made. Not with a sharded student, which is refused.
        """
        return None

    def hooks(self) -> Sequence[ModelHook]:
        """What acts on the student's forward, for all terms; see `student.learning.hooks`. Called after `module`."""
        return ()

    def admits(self, row: Row | Outcome) -> bool:
        """Whether the setting `rows` lets the term look at a row, or at its outcome."""
        return self.settings.rows == "all" or row.on_policy == (self.settings.rows == "sampled")

    def selects(self, row: Row) -> bool:
        """Whether the term learns from `row`; called after `prepare`. Other rows count in no mean of the term."""
        unread = row.unread and any(need.role in row.unread for need in self.needs().signals)
        return row.trained and self.admits(row) and not unread

    def within(self, row: Row) -> NDArray[np.bool_]:
        """[T] the positions of a selected row that the term may learn from, by the setting `first_turns`."""
        first = self.settings.first_turns
        if first is None or not row.turns:
            return np.ones(row.length, np.bool_)
        return np.arange(row.length) < row.turns[:first][-1][1]

    def sequence(self, row: Row) -> Hashable:
        """Rows for which this is equal count as one response in aggregation: those of an episode."""
        return row.key.rollout

    def stratum(self, row: Row) -> str:
        """Which stratum of aggregation balanced `row` belongs to, by the setting `strata`."""
        what = self.settings.strata
        if what in ("domain", "teacher"):
            return (row.prompt.domain or "") if what == "domain" else row.teacher
        return row.tags.get(what, "")

    def strata(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Strata of the rows of all ranks, from their outcomes."""
        what = self.settings.strata
        if what in ("domain", "teacher"):
            return sorted({outcome.domain if what == "domain" else outcome.teacher for outcome in outcomes})
        return sorted({outcome.tags.get(what, "") for outcome in outcomes})

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Look at the whole batch of the step, once before its first update: statistics over rows belong here.

        Args:
            rows: this rank's rows.
            outcomes: those of all rows on all ranks.
            places: where in `outcomes` each of `rows` is.
        """

    def prepare(self, rows: Sequence[Row]) -> None:
        """Look at this rank's rows of an update before they are cut into micro-batches."""

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The loss of each position of a micro-batch."""
        raise PluginError(f"{type(self).__name__} does not implement token_losses.")

    def observe(self, report: StepReport) -> None:
        """Learn from the finished step."""

    def measured(self, report: StepReport, metric: str) -> float | None:
        """What this term measured in the step under `metric`, and not another one; None where it measured nothing."""
        found = report.metrics.get(f"{self.label}/{metric}")
        return found if found is not None or self.repeats else report.metrics.get(metric)

    def state_dict(self) -> dict[str, Any]:
        """State to checkpoint: JSON values, numpy arrays and tensors in nested dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
