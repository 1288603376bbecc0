"""Controllers: methods that steer the loop around the update (windows, curricula, weight jumps).

A controller may rewrite the plan before the rollout, filter rows, order the updates, and act on the weights after them.
It sees the plan, the rows, the report of the step and a few narrow services; parts of the trainer only if it asks for a
`Workbench`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import TypeVar

from opd.config import Settings
from opd.registry import Registry
from student.data.outcome import Outcome
from student.data.plan import StepPlan
from student.data.report import EvalReport
from student.data.row import Row
from student.plugin.base import Plugin

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from opd.tasks.prompt import Prompt
    from opd.wire.types import PayloadSpec, ScoreItem, Scores
    from student.learning.learner import Learner
    from student.learning.updates import Update
    from student.rollout.policy_sampler import PolicySampler
    from student.scoring.score import Scoring

T = TypeVar("T")
CONTROLLERS = Registry(
    "method",
    "opd.methods",
    member="settings_type",
    names={
        "expert_rows": "student.methods.distil.expert_rows:ExpertRows",
        "adwin": "student.methods.windows.adwin:Adwin",
        "fixed_window": "student.methods.windows.windows:FixedWindow",
        "first_n": "student.methods.windows.windows:FirstN",
        "staircase": "student.methods.windows.windows:Staircase",
        "linear_window": "student.methods.windows.windows:LinearWindow",
        "effopd": "student.methods.jumps.effopd:EffOpd",
        "tcod": "student.methods.curricula.tcod:Tcod",
        "modes": "student.methods.curricula.modes:Modes",
        "critic": "student.rl.critic:Critic",
    },
)


class ControllerSettings(Settings):
    """Settings that every controller has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""


ControllerSettings_co = TypeVar(
    "ControllerSettings_co", bound=ControllerSettings, covariant=True, default=ControllerSettings
)


@dataclass(frozen=True, slots=True)
class Workbench:
    """Parts of the loop, for a controller that makes passes of its own besides training.

    Attributes:
        learner: weights, objective and optimizer; trained weights must be left as they were found.
        sampler: samples from the weights.
        scorer: a scorer for this bench alone, so that another thread may use it.
        poll: to be called while waiting; may raise to give up.
        closing: registers a callback for the end of the run, before the parts are closed.
    """

    learner: Learner
    sampler: PolicySampler
    scorer: Scoring
    poll: Callable[[], None]
    closing: Callable[[Callable[[], None]], object]


class Services(Protocol):
    """What a controller may ask of the loop.

    Attributes:
        tokenizer: the student's.
        outcomes: those of the step's rows on all ranks; while a step is planned, those of the previous step.
    """

    tokenizer: Any
    outcomes: Sequence[Outcome]

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and trained tensors of the student, on its device; writable under no_grad."""

    def rollout(self, plan: StepPlan) -> list[Row]:
        """Sample the rows of `plan` with the current weights; they are not trained on."""

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
        """Score any responses with the current student or a kept copy, in this process; counted in the costs.

        Args:
            items: rows, or ids with the length of their prompt.
            spec: the payload; None for log-probs of the response tokens.
            model: "student", or "initial" or "ema" if `needs` names them in `models`.
            temperature: divides the logits; None for the temperature of rollouts.
        """

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form that equal answers share; None where there is none."""

    def refresh(self, model: str, decay: float) -> None:
        """Update the kept copy "initial" or "ema": e <- decay e + (1 - decay) w, w the student's; decay 0 copies."""

    def workbench(self) -> Workbench:
        """Make a workbench with a scorer of its own; ADWIN's probes run on one."""

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks; every rank must call it equally often."""

    def add_costs(self, counts: Mapping[str, float]) -> None:
        """Add what a probe spent to the costs of the step."""

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        seed_names: Sequence[object],
        samples: int = 1,
        reverse_kl: bool = False,
        temperature: float | None = None,
    ) -> EvalReport:
        """Sample, verify and optionally score `prompts` with the current weights.

        Calls with equal `seed_names` draw equal random numbers, for paired comparisons. Temperature None is that of the
        rollouts.
        """

    def prompts(self, count: int) -> list[Prompt]:
        """Take the next `count` prompts of the run, which are then used nowhere else; every rank must ask for as many.

        Within `plan` or `updates` they belong to the step, within `after_update` to that call: if the step or call is
        interrupted and repeated, it gets the same prompts.
        """

    def training_prompts(self, count: int, *, seed_names: Sequence[object]) -> list[Prompt]:
        """`count` prompts of the training set, chosen by the stream `seed_names`."""

    def optimizer_moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Names of parameters and their optimizer state tensors (exp_avg, exp_avg_sq), writable."""


class Controller(Plugin[ControllerSettings_co]):
    """Base class of controllers; every hook has a default that does nothing.

    A controller that acts inside the student's forward pass is also a `student.data.hooks.ModelHook`.
    """

    services: Services
    """What the loop offers, from `start` on."""

    def check_model(self, lm: PreTrainedModel) -> None:
        """Look at the student, whose tensors are still without content, before it is loaded, also in a dry run.

        Raises:
            ConfigError: if the method cannot work with such a model.
        """

    def start(self, services: Services) -> None:
        """Prepare, once, before the first step or after a resume."""

    def plan(self, plan: StepPlan) -> StepPlan:
        """Rewrite the plan of a step.

        It must not change what `state_dict` saves, because an interrupted step is planned again after a resume.
        """
        return plan

    def compose(self, rows: list[Row]) -> list[Row]:
        """Filter, replay, recompose or re-weight the scored rows of a step.

        It sees only the rows of this rank. Numbers for a choice among all rows go into `Row.notes` and reach every rank
        through `Services.outcomes` and the report. Like `plan`, it must not change what `state_dict` saves.
        """
        return rows

    def updates(self, updates: Iterable[Update], services: Services) -> Iterable[Update]:
        """Reorder, drop, repeat or re-weight the optimizer updates of a step.

        A generator may look at the student between two updates. Every rank must yield equally many. Like `plan`, it
        must not change what `state_dict` saves before the first update; after that, the step counts as done even if a
        later update fails.
        """
        return updates

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Act on the weights after the updates of `step`; returns metrics.

        If a service of the loop raises, weights and saved state must be left as they were before the call, which is
        repeated after a resume. If its own code fails, the run saves nothing: it resumes from its last checkpoint.
        """
        return {}

    def finished(self) -> bool:
        """Whether the run should end before `train.steps`; called before each step on every rank."""
        return False


def begin(controller: Controller, services: Services) -> None:
    """Give a controller its services and start it."""
    controller.services = services
    controller.start(services)
