"""Makes the scorers of a run: one for the objective, others for evaluations, checks and workbenches."""

from dataclasses import dataclass

import torch

from opd.fleet.membership.outage import OutageHooks
from student.data.needs import Needs
from student.job.preparation import Prepared
from student.job.services import ReadingServices
from student.scoring.local import LocalModels
from student.scoring.rewards.rounds import StepRewards
from student.scoring.score import Scoring
from student.scoring.stops import StopMap
from student.scoring.verify import Verification


@dataclass(frozen=True, slots=True)
class Scorers:
    """Makes scorers, each with its own needs; all share the fleet, the local models and the verifiers.

    Attributes:
        prepared: the parts of the run that need no weights.
        verification: judges answers.
        local: the models in this process.
        device: the device for heads of hidden payloads.
        services: passed to rewards.
    """

    prepared: Prepared
    verification: Verification
    local: LocalModels
    device: torch.device
    services: ReadingServices

    def make(self, needs: Needs, stops: StopMap | None = None, *, hooks: OutageHooks | None = None) -> Scoring:
        """A scorer for `needs`.

        Args:
            needs: what is needed.
            stops: replaces the run's own map of stop tokens.
            hooks: called during an outage of a teacher, in the thread that waits; None for nothing.
        """
        prepared = self.prepared
        return Scoring(
            prepared.fleet,
            prepared.recipe.teachers,
            needs,
            self.verification,
            self.device,
            known=prepared.models.infos,
            local=self.local,
            contexts=prepared.contexts,
            stops=prepared.stops if stops is None else stops,
            translators=prepared.models.translators,
            rewards=self._rewards,
            hooks=hooks,
        )

    def objective(self, hooks: OutageHooks | None = None) -> Scoring:
        """A scorer for the needs of the objective and of everything else that the recipe names."""
        return self.make(self.prepared.plugins.needs, hooks=hooks)

    def _rewards(self) -> StepRewards:
        # Asked for rows that are not of the step, such as probes': metrics of the step must not count these.
        return StepRewards(self.prepared.plugins.rewards.aside(), self.services)
