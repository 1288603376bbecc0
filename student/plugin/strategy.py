"""Rollout strategies: how the plan of a step becomes rows, in rounds that all ranks take together.

    single                  every planned row, once
    dynamic_sampling        further prompts until enough groups have rewards that differ
    adaptive_oversampling   as many more prompts as the last steps lost
    reinforce_ada           further answers until a prompt has right and wrong ones
    self_interference       only prompts that greedy decoding does not solve
    lte, guide, icpo        a second pass, or an answer, under a hint that is not trained on
    critique, rubric_guide  one answer of each group is refined from another one and its critique
    arpo, cure              episodes or answers that branch where the student became uncertain
    seele, svs              as much of the solution as helps; problems that the student writes
    future_bridge           a turn of the teacher in an episode, where the student goes on better after it
    replay, rorecomp        groups of earlier steps along with the new ones

A strategy samples rows, has them scored, looks at their outcomes on all ranks, and may sample more. It does everything
through `Sampling` and decides only by what `Sampling` returns for all ranks, so that every rank decides alike. A third
party adds a strategy through the entry-point group `opd.rollout_strategies`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import TypeVar

from opd.config import Settings
from opd.errors import PluginError
from opd.registry import Registry
from student.plugin.base import Plugin
from student.plugin.early import reads_no_scores
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from student.data.plan import StepPlan
    from student.data.row import Row
    from student.rollout.sampling import Sampling

STRATEGIES = Registry(
    "rollout_strategy",
    "opd.rollout_strategies",
    member="settings_type",
    names={
        "single": "student.plugin.strategy:Single",
        "dynamic_sampling": "student.rollout.strategies.dynamic_sampling:DynamicSampling",
    },
)


class StrategySettings(Settings):
    """Settings that every strategy has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""


StrategySettings_co = TypeVar("StrategySettings_co", bound=StrategySettings, covariant=True, default=StrategySettings)


class Strategy(Plugin[StrategySettings_co]):
    """Base class of rollout strategies; subclasses implement `run` and may override the hooks of `Plugin`."""

    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        """Sample the rows of the step and have them scored.

        It must not change what `state_dict` saves, because an interrupted step is taken again after a resume.

        Args:
            plan: this rank's share of the step's plan.
            sampling: samples, scores and communicates with other ranks.

        Returns:
            This rank's rows, in whole groups; may be empty.
        """
        raise PluginError(f"{type(self).__name__} does not implement run.")


class Single(Strategy):
    """Samples every planned row once."""

    evidence: ClassVar[str] = "own"
    traits = Traits(works_ahead=True)

    @reads_no_scores
    def run(self, plan: StepPlan, sampling: Sampling) -> list[Row]:
        return sampling.score(sampling.sample(plan.rows))
