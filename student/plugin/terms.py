"""Terms, the summands of an objective: the base class, and what a term returns.

A term sees the response positions of a micro-batch as flat tensors (`student.data.token_batch`) and returns one loss
per position. Weights, masks and denominators belong to the objective (`student.learning.objective`). Shapes:
N positions, T tokens of one response.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field
from typing_extensions import TypeVar

from opd.config import Settings
from opd.errors import ConfigError, PluginError, short
from opd.registry import Registry
from opd.wire.types import PayloadKind
from student.data.schedule import WeightSchedule
from student.data.token_batch import TokenBatch, UndeclaredError
from student.plugin.base import Plugin
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from student.data.outcome import Outcome
    from student.data.report import StepReport
    from student.data.row import Row
    from student.model.model import Student

OBJECTIVES = Registry(
    "objective",
    "opd.objectives",
    member="settings_type",
    names={
        "opd": "student.methods.distil.opd:OnPolicyDistillation",
        "gopd": "student.methods.distil.gopd:GeneralisedOpd",
        "exopd": "student.methods.distil.gopd:ExOpd",
        "span_opd": "student.methods.distil.span_opd:SpanDistillation",
        "bpm": "student.methods.distil.bpm:BytePrefixMarginalisation",
        "sft": "student.methods.distil.sft:SupervisedFineTuning",
        "reference_kl": "student.methods.distil.reference_kl:ReferenceKl",
        "policy_gradient": "student.rl.losses.policy_gradient:PolicyGradient",
        "grpo": "student.rl.losses.grpo:Grpo",
        "ppo": "student.rl.losses.variants:Ppo",
        "gspo": "student.rl.losses.variants:Gspo",
        "dapo": "student.rl.losses.variants:Dapo",
        "dr_grpo": "student.rl.losses.variants:DrGrpo",
        "rloo": "student.rl.losses.rloo:Rloo",
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class TermOutput:
    """What a term computed: either `loss` or `total`.

    Attributes:
        loss: [N] loss per position, nats, with gradient; the objective ignores masked positions.
        total: scalar, the sum of the losses times `TokenBatch.weights`, for kernels that apply the weights themselves.
        metrics: name -> (numerator, denominator), each summed over micro-batches and ranks before the division.
    """

    loss: Float[Tensor, " n"] | None = None
    total: Float[Tensor, ""] | None = None
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


def losses_of(term: Term, batch: TokenBatch) -> TermOutput:
    """Compute `term` on `batch`; with several teachers, sum_i w_i D_i over the teachers of `batch.shares`.

    D_i is the term on a batch with teacher i alone. A term that needs no teacher is computed once.

    Returns:
        Loss per position or weighted total, nats. The teachers' metrics are averaged with the same weights w_i.
    """
    if not batch.shares or not term.needs().teacher:
        return _checked(term, batch)
    loss: Tensor | None = None
    total: Tensor | None = None
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {}
    for share in batch.shares:
        # A total is a sum with the batch's weights, so w_i goes into these; a loss per position is scaled below.
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
    """Call `token_losses` and check the result: a loss of the wrong shape would silently broadcast over positions."""
    try:
        output = term.token_losses(batch)
    except (UndeclaredError, AttributeError, KeyError) as error:
        read, needs = _undeclared(error), term.needs()
        if read is None:
            raise
        views = ", ".join(sorted(needs.student)) or "none"
        raise PluginError(
            f"term {str(term.settings.name)!r} declared {needs.describe()} (views of the student: {views}) and read "
            f"{read}; declare that in its needs too."
        ) from error
    if not isinstance(output, TermOutput):
        raise PluginError(
            f"{type(term).__name__} returned a {type(output).__name__}; token_losses must return a TermOutput."
        )
    loss, name = output.loss, type(term).__name__
    if loss is not None and (not hasattr(loss, "requires_grad") or loss.shape != batch.mask.shape):
        of = f"loss of shape {list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise PluginError(
            f"{name} returned a {of} for {len(batch.mask)} positions; it must be a tensor with one number per position."
        )
    for metric, pair in output.metrics.items():
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise PluginError(f"{name} has metric {metric!r} as {short(pair)}, not as (numerator, denominator).")
    return output


def _undeclared(error: UndeclaredError | AttributeError | KeyError) -> str | None:
    """What a term read without declaring it, as far as its exception tells; None if that is about something else."""
    if isinstance(error, UndeclaredError):
        return error.what
    if isinstance(error, AttributeError):  # the view or payload is None
        return f"{error.name} of an undeclared view or payload" if error.obj is None and error.name in _FIELDS else None
    match error.args:  # of `batch.signals`
        case ((str(role), PayloadKind() as kind),):
            return f"{kind} from the {role}"
    return None


_FIELDS = {"sampled", "values", "ids", "log_tail", "entropy", "hidden", "head", "logits", "weight", "times", "shape"}
"""Attributes of the views of the student and of payloads."""
AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "turn_mean", "constant", "balanced")


class TermSettings(Settings):
    """Settings that every term has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""
    weight: float | WeightSchedule = 1.0
    """Factor of the term's loss: a number, or a schedule {from: 0, to: 0.1, steps: 100}."""
    aggregation: str = "token_mean"
    """How positions are averaged. token_mean: over all trained tokens of the update. sequence_mean, prompt_mean and
    turn_mean: first over the tokens of a response, of all responses to a prompt, or of a turn, then over these.
    constant: the sum is divided by responses times the length limit, so a truncated response keeps exactly the
    gradients of its tokens. balanced: token means within each of `strata`, weighted by their number of responses. An
    estimate from the sampled token that is unbiased at its position stays unbiased over responses only with constant,
    because means divide by lengths, which depend on the sampled tokens: token_mean is biased by about 1 / rows of the
    step (5 % at 4 rows, 0.3 % at 64 in docs/estimators.md), sequence_mean by more (29 % with payload sampled, 11 %
    with gather), whatever the number of rows."""
    strata: str = "domain"
    """Strata of aggregation balanced: domain, teacher, or the name of a tag of the rows; in policy losses also credit,
    the sign of the advantage."""
    rows: Literal["all", "sampled", "expert"] = "all"
    """Rows that the term learns from and averages over. all: every row; sampled: those that the student sampled under
    the prompt that they are trained under; expert: the other rows (see method expert_rows)."""
    first_turns: int | None = Field(None, ge=1)
    """Learn from and average over only this many turns of an episode, from the first on; null for all."""

    def admits(self, row: Row | Outcome) -> bool:
        """Whether `rows` includes a row, judged by the row itself or by its outcome."""
        return self.rows == "all" or row.on_policy == (self.rows == "sampled")

    def within_turns(self, row: Row) -> NDArray[np.bool_]:
        """[T] bool, the positions of a row that `first_turns` leaves."""
        if self.first_turns is None or not row.turns:
            return np.ones(row.length, np.bool_)
        return np.arange(row.length) < row.turns[: self.first_turns][-1][1]

    def strata_of(self, outcomes: Sequence[Outcome]) -> list[str]:
        """All of `strata` that occur in the step, over all ranks, from the outcomes of the rows; sorted."""
        if self.strata in ("domain", "teacher"):
            return sorted({outcome.domain if self.strata == "domain" else outcome.teacher for outcome in outcomes})
        return sorted({outcome.tags.get(self.strata, "") for outcome in outcomes})


TermSettings_co = TypeVar("TermSettings_co", bound=TermSettings, covariant=True, default=TermSettings)


class Term(Plugin[TermSettings_co]):
    """Base class of the terms of an objective. Subclasses give `needs` and `token_losses`.

    Attributes:
        repeats: whether an earlier term of the objective has the same name; if so, all its metrics begin with `label`.
    """

    @property
    def traits(self) -> Traits:
        return Traits(learns_from_stale_rows=self.settings.rows == "expert")

    def __init__(self, settings: TermSettings_co) -> None:
        super().__init__(settings)
        self.repeats = False

    def bind(self, tokenizer: Any) -> None:
        """Receive the student's tokenizer, once, before the first step."""

    def module(self, student: Student) -> tuple[nn.Module, float] | None:
        """Parameters of the term's own, trained along with the student's, and their peak learning rate.

        Called once, before the optimizer is made. A term with such parameters is refused if the student is sharded.
        """
        return None

    def selects(self, row: Row) -> bool:
        """Whether the term learns from `row`; called after `prepare`. Other rows count in none of its means."""
        unread = row.unread and any(need.role in row.unread for need in self.needs().signals)
        return row.trained and self.settings.admits(row) and not unread

    def stratum(self, row: Row) -> str:
        """The stratum of `row` for aggregation balanced, one of those that `TermSettings.strata_of` gives."""
        what = self.settings.strata
        if what in ("domain", "teacher"):
            return (row.prompt.domain or "") if what == "domain" else row.teacher
        return row.tags.get(what, "")

    def assess(self, rows: Sequence[Row], outcomes: Sequence[Outcome], places: Sequence[int]) -> None:
        """Look at the whole batch of the step, once, before its first update; statistics over rows belong here.

        Args:
            rows: this rank's rows.
            outcomes: the outcomes of all rows on all ranks.
            places: the index in `outcomes` of each of `rows`.
        """

    def prepare(self, rows: Sequence[Row]) -> None:
        """Look at this rank's rows of an update, before they are split into micro-batches.

        Raises:
            ConfigError: if the term would learn from given rows and cannot.
        """
        if not self.traits.learns_from_given_rows and any(not row.on_policy and self.selects(row) for row in rows):
            raise ConfigError(
                f"term {self.settings.name!r} estimates from the sampled token, so it needs rows that the student "
                "sampled; set its rows to sampled, or use payload gather or hidden."
            )

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The loss of each position of a micro-batch."""
        raise PluginError(f"{type(self).__name__} does not implement token_losses.")


def metric_names(term: Term, metric: str) -> tuple[str, ...]:
    """The names under which a step's metrics may hold this very term's `metric`; the first that they hold is it."""
    if metric == "loss":
        return (f"loss/{term.label}",)
    return (f"{term.label}/{metric}",) if term.repeats else (f"{term.label}/{metric}", metric)


def measured(term: Term, report: StepReport, metric: str) -> float | None:
    """The value that this very term reported as `metric` in the step; None if it reported none."""
    return next((report.metrics[name] for name in metric_names(term, metric) if name in report.metrics), None)


def build_terms(entries: Sequence[Mapping[str, Any]]) -> list[Term]:
    """Terms from the `objective` entries of a recipe."""
    terms: list[Term] = []
    for index, entry in enumerate(entries):
        term: Term = OBJECTIVES.make(entry, Term, f"objective.{index}")
        if term.settings.aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"objective.{index}.aggregation is {term.settings.aggregation!r}; use one of {', '.join(AGGREGATIONS)}."
            )
        terms.append(term)
    return terms
