"""Controllers: methods that steer the loop around the update (windows, curricula, weight jumps).

A controller rewrites the plan before the rollout, may filter rows, and acts after the update. It sees the plan,
the rows, the report of the step and a few narrow services; the trainer only where it asks for a `Workbench`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from opd.config import Settings
from opd.registry import Registry
from student.data.outcome import Outcome
from student.data.plan import StepPlan
from student.data.row import Row
from student.scoring.needs import Needs

if TYPE_CHECKING:
    from torch import Tensor

    from opd.tasks.prompt import Prompt
    from opd.wire.types import PayloadSpec, ScoreItem, Scores
    from student.learning.hooks import ModelHook
    from student.learning.learner import Learner
    from student.learning.terms import Term
    from student.learning.updates import Update
    from student.recipe import Recipe
    from student.rollout.engine import PolicySampler
    from student.scoring.score import Scorer

T = TypeVar("T")
CONTROLLERS = Registry("method", "opd.methods", member="settings_type")


class ControllerSettings(Settings):
    """Settings that every controller has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation on prompts with a verifier.

    Attributes:
        accuracy: mean verdict over prompts whose verdict is known, 0 to 1.
        per_prompt: mean verdict of each prompt; None where unknown.
        mean_length: tokens per response.
        truncated: fraction of responses that hit the length limit.
        reverse_kl: KL(student || teacher), nats per token, or None when it was not asked for.
        tokens: response tokens sampled.
        by_domain: accuracy and number of judged prompts of each domain that prompts name.
        accuracy_half_width: half the 95 % interval of `accuracy` over prompts; None below two judged prompts.
        pass_at: k -> (pass@k, half its interval), over prompts with at least k judged answers; values in between do
            not count as correct. Empty for single answers.
        reverse_kl_estimator: how `reverse_kl` was measured, "" where it was not.
        repetition: share of 4-grams that occur earlier in their response, mean over responses.
        modes: figures of modes by name, see `student.orbit.figures`; empty for a run without modes.
        samples: answers to the first prompts as `student.run.samples.sample_of` gives them, where they were asked for.
    """

    accuracy: float
    per_prompt: tuple[float | None, ...]
    mean_length: float
    truncated: float
    reverse_kl: float | None
    tokens: int
    by_domain: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    accuracy_half_width: float | None = None
    pass_at: Mapping[int, tuple[float, float | None]] = field(default_factory=dict)
    reverse_kl_estimator: str = ""
    repetition: float = 0.0
    modes: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did: its metrics by name, and the outcomes of its rows.

    Attributes:
        step: index of the optimizer step.
        metrics: reduced over micro-batches and ranks.
        outcomes: of the rows of the batch on all ranks; the same when the run was stopped and resumed after the update.
    """

    step: int
    metrics: Mapping[str, float]
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Workbench:
    """Parts of the loop, for a controller that makes passes of its own besides training.

    Attributes:
        learner: weights, objective and optimizer; what is trained must be left as it was found.
        sampler: samples from the weights.
        scorer: made for this bench, so that a thread of its own may use it.
        poll: to be called while waiting; may raise to give up.
        closing: takes what is to be called when the run ends, before the parts are closed.
    """

    learner: Learner
    sampler: PolicySampler
    scorer: Scorer
    poll: Callable[[], None]
    closing: Callable[[Callable[[], None]], object]


class Services(Protocol):
    """What a controller may ask of the loop."""

    @property
    def tokenizer(self) -> Any:
        """The student's tokenizer."""

    @property
    def outcomes(self) -> Sequence[Outcome]:
        """Outcomes of the rows of the step on all ranks; those of the last step while the next one is planned."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and trained tensors of the student, on its device; writable under no_grad."""

    def rollout(self, plan: StepPlan) -> list[Row]:
        """Sample the rows of `plan` with the current weights; no loss is taken on them."""

    def score(self, rows: Sequence[Row]) -> list[Row]:
        """Score rows with the payloads that the objective needs; blocks."""

    def read(
        self,
        items: Sequence[Row | ScoreItem],
        spec: PayloadSpec | None = None,
        *,
        model: str = "student",
        temperature: float | None = None,
    ) -> list[Scores]:
        """What the student now, or a copy of it, says about any responses, in process; counted among the costs.

        Args:
            items: rows, or any ids with a prompt's length.
            spec: the payload; log-probs of the response tokens when None.
            model: "student", or "initial" or "ema" where `needs` names them in `models`.
            temperature: divides the logits; None for that of the rollouts.
        """

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form that equal answers share; None where there is none."""

    def refresh(self, model: str, decay: float) -> None:
        """Move the kept copy "initial" or "ema" towards the student: e <- decay e + (1 - decay) w; 0 copies."""

    def workbench(self) -> Workbench:
        """Parts of the loop with a scorer of their own, made on each call; ADWIN's probes run on one."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; every rank must call it equally often."""

    def add_costs(self, counts: Mapping[str, float]) -> None:
        """Count what a probe spent among the costs of the step."""

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        seed_names: Sequence[object],
        samples: int = 1,
        reverse_kl: bool = False,
        temperature: float | None = None,
    ) -> EvalReport:
        """Sample, verify and optionally score `prompts` with the current weights; None for the rollouts' temperature.

        Equal `seed_names` draw equal random numbers: common random numbers for paired comparisons.
        """

    def prompts(self, count: int) -> list[Prompt]:
        """The next `count` prompts of the run, which then come up nowhere else; every rank must ask for as many.

        Asked within `plan` or `updates` they are the step's, within `after_update` that call's: when it is interrupted
        and made again, it gets the same ones.
        """

    def training_prompts(self, count: int, *, seed_names: Sequence[object]) -> list[Prompt]:
        """`count` prompts of the training set, chosen by the stream `seed_names`."""

    def optimizer_moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Names of parameters and their optimizer state tensors (exp_avg, exp_avg_sq), writable."""


class Controller:
    """Base of controllers; every hook has a default that does nothing."""

    settings_type: ClassVar[type[ControllerSettings]] = ControllerSettings
    why_not_stale: ClassVar[str] = "it does not say that it can plan a step before those before it are observed"
    """Why it cannot work with `train.max_staleness`, a clause; "" where it can: it remembers nothing between `plan` and
    the other hooks of a step but what `state_dict` saves, because further steps are planned in between."""
    gives_answers: ClassVar[bool] = False
    """Whether its plans hold rows whose answer is given (`PlannedRow.answer`), which the student itself reads."""
    gives_log_probs: ClassVar[bool] = False
    """Whether the rows that it gives come with log-probs under a policy, for the ratio to it."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self._services: Services | None = None

    @property
    def services(self) -> Services:
        """What `begin` is given, for the hooks that are given no services themselves."""
        if self._services is None:
            raise RuntimeError(f"{type(self).__name__} asks for services before it was started.")
        return self._services

    def needs(self) -> Needs:
        """What the controller needs beyond the objective."""
        return Needs()

    def hooks(self) -> Sequence[ModelHook]:
        """What acts on the student's forward; see `student.learning.hooks`."""
        return ()

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Look at the whole recipe before anything is loaded, also in a dry run.

        Raises:
            ConfigError: when the method cannot work in it.
        """

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Look at the first training prompts before the student is loaded, also in a dry run.

        Raises:
            DataError, ConfigError: when they lack what it reads, or it cannot work with them.
        """

    def against_summaries(self) -> str:
        """Why it cannot work where students summarise episodes (history: summary), a clause; "" where it can."""
        return ""

    def remarks(self, recipe: Recipe) -> list[str]:
        """What a person should know of it in the recipe although it works, one clause each."""
        return []

    def begin(self, services: Services) -> None:
        """Keep the services and start; the loop calls it."""
        self._services = services
        self.start(services)

    def start(self, services: Services) -> None:
        """Called once before the first step, also after a resume; `begin` has kept the services."""

    def plan(self, plan: StepPlan) -> StepPlan:
        """Rewrite the plan of a step.

        Must not change what `state_dict` saves: a step that was interrupted is planned again after a resume.
        """
        return plan

    def compose(self, rows: list[Row]) -> list[Row]:
        """Filter, replay, recompose or re-weight the scored rows of a step.

        Sees the rows of this rank alone: what is to be chosen from all of them goes into `Row.notes` and comes back to
        every rank in `Services.outcomes` and in the report. Must not change what `state_dict` saves, like `plan`.
        """
        return rows

    def updates(self, updates: Iterable[Update], services: Services) -> Iterable[Update]:
        """Reorder, drop, repeat or re-weight the optimizer updates of a step.

        A generator may look at the student between two of them. Every rank must give equally many. Must not change what
        `state_dict` saves before the first update, like `plan`; after it the step counts as done, even when a later
        update fails.
        """
        return updates

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Act on the weights after the updates of `step`; returns metrics.

        When a service of the loop raises, weights and saved state must be left as they were before the call: it is
        made again after a resume.
        """
        return {}

    def observe(self, report: StepReport) -> None:
        """Learn from the step."""

    def finished(self) -> bool:
        """Whether the run has what it was for, and ends before `train.steps`; asked before each step on every rank."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """State to checkpoint: JSON values, numpy arrays and tensors in nested dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
