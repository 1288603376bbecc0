"""A served teacher that follows the student: its servers load the moving average whenever it has changed.

The average itself is model `ema` (`student.scoring.local`), which is part of checkpoints; a resumed run has it served
again before its first step. The self-teacher thus runs on machines of its own, while the student's only keep the
average.

    FOLDER/step-000012/model    the average after step 12, as a Hugging Face folder or an adapter; the last two stay
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import IncompatibleTeacherError
from opd.fleet.source import ScoreSource
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from student.data.needs import EMA
from student.model.model import Student
from student.model.ranks import Ranks
from student.plugin.controllers import Controller, ControllerSettings, Services
from student.rollout.known_row import distance, tolerance
from student.run.checkpoint import save_checkpoint
from student.run.model_folder import model_parts
from student.scoring.local import LocalModels
from student.settings.recipe import Recipe

_KEPT = 2
"""The current average, and the previous one, to which a server returns if it cannot load the current one."""
_ROW = ScoreItem(np.arange(8, dtype=np.uint32), 4)
"""A row that both sides score after each change; its ids exist in every vocabulary."""


class ServedAverage(Controller):
    """Keeps a served teacher at the average, `teachers.ema.served`; every rank makes the same calls.

    Args:
        recipe: a recipe with `teachers.ema.served`.
        fleet: this rank's client of the fleet.
        local: holds the average.
        student: the student, whose weights are replaced by the average while it is written.
        tokenizer: saved with the average.
        ranks: all ranks; rank 0 has the servers load the folder.
        poll: called while the average scores a row; may raise to give up.
    """

    def __init__(
        self,
        recipe: Recipe,
        fleet: ScoreSource,
        local: LocalModels,
        student: Student,
        tokenizer: Any,
        ranks: Ranks,
        poll: Callable[[], None],
    ) -> None:
        super().__init__(ControllerSettings(name="served_average"))
        assert recipe.teachers is not None and recipe.teachers.ema.served is not None
        self.teacher = recipe.teachers.ema.served
        self._seconds = recipe.teachers.ema.seconds
        beside = recipe.run.absolute().with_name(f"{recipe.run.name}.teacher")
        self._folder = (recipe.teachers.ema.folder or beside).absolute()
        self._fleet, self._local, self._student = fleet, local, student
        self._tokenizer, self._ranks, self._poll = tokenizer, ranks, poll
        self._steps = 0
        self._served = -1

    def start(self, services: Services) -> None:
        """Serve the average before the first step, because the servers may hold any weights."""
        self._follow(self._steps)

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Serve the new average. No row waits for the teacher between steps, so no step mixes two averages."""
        metrics = self._follow(step + 1) if self._local.kept.moves[EMA] != self._served else {}
        self._steps = step + 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The number of steps after which the average was taken, which names its folder."""
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])

    def _follow(self, steps: int) -> dict[str, float]:
        """Have the servers load the average after `steps` steps.

        Raises:
            RunFolderError: the folder cannot be written.
            IncompatibleTeacherError: what they answer then is not the average.
            OpdError: no server took it; the run can go on from its checkpoint.
        """
        began = time.perf_counter()
        with self._local.kept.average():
            parts = model_parts("model", self._student, self._tokenizer, self._ranks)
            folder = save_checkpoint(self._folder, steps, parts, keep=_KEPT, ranks=self._ranks)
        # Only rank 0 has the servers load it; the clients of the other ranks accept what is served.
        main = self._ranks.index == 0
        loaded = self._ranks.gather(self._ranks.agree(lambda: self._load(folder / "model") if main else ""))[0]
        if not main:
            self._fleet.adopt(self.teacher, loaded)
        gap = self._measured()
        self._served = self._local.kept.moves[EMA]
        return {"follow/seconds": time.perf_counter() - began, "follow/gap": gap}

    def _measured(self) -> float:
        """The largest gap over the clients of all ranks, nats."""
        # Not inside `agree`: ranks of a sharded student gather its layers together.
        (mine,) = self._local.score(EMA, [_ROW], PayloadSpec.sampled(), temperature=1.0, poll=self._poll)
        row = mine.sampled
        assert row is not None  # what was asked for
        return max(self._ranks.gather(self._ranks.agree(lambda: self._gap(row))))

    def _load(self, folder: Path) -> str:
        """Have the servers load a folder; returns the hash of the weights that they then serve."""
        return self._fleet.update_weights(self.teacher, folder, timeout=self._seconds).weights_hash

    def _gap(self, mine: NDArray[np.float32]) -> float:
        """The largest difference between the served log-probs of the row and `mine`, nats; 0 up to rounding.

        Raises:
            IncompatibleTeacherError: if it is more than rounding, so that the servers hold other weights.
        """
        (theirs,) = self._fleet.score(self.teacher, [_ROW], PayloadSpec.sampled())
        assert theirs.sampled is not None  # what was asked for
        gap = distance(theirs.sampled, mine)
        served = pb.Dtype.Name(self._fleet.describe(self.teacher).compute_dtype)
        if gap > tolerance("float32" if served == "DTYPE_F32" else "bfloat16"):
            raise IncompatibleTeacherError(
                f"after loading the student's average, teacher {self.teacher!r} returns log-probs up to {gap:.3g} "
                "nats from it, more than rounding explains; serve the student's own model, or for a LoRA student its "
                "base with an adapter (BASE+ADAPTER)."
            )
        return gap
