"""Which rows an update reads together, and whether rows of one prompt share its forward and backward pass."""

from collections.abc import Sequence

from student.data.batch import split
from student.data.costs import positions
from student.data.needs import HIDDEN, Needs
from student.data.prefixes import spared, split_groups
from student.data.row import Row
from student.model.continued import continues
from student.model.model import Student
from student.model.ranks import Ranks
from student.model.sharding import units
from student.settings.train import TrainSettings

_LEAST_SHARE = 8
"""Sharing must spare this part of all positions: an eighth. What follows a prefix is attended to with a mask."""
_LEAST_WORK = {"cpu": 2**30, "cuda": 2**38}
"""Parameters times tokens that a micro-batch must spare, or the second pass costs more than it spares."""


class MicroBatches:
    """Splits the rows of updates.

    Args:
        student: the model that reads them.
        needs: everything the terms need, merged.
        settings: the recipe's `train` group.
        ranks: the ranks of the run.
        shortest_first: see `Learner`.
    """

    def __init__(
        self, student: Student, needs: Needs, settings: TrainSettings, ranks: Ranks, *, shortest_first: bool
    ) -> None:
        self._student, self._settings, self._ranks = student, settings, ranks
        self._by_teacher, self._shortest_first = HIDDEN in needs.student, shortest_first
        self._sharded = bool(units(student))
        self._parameters = sum(parameter.numel() for parameter in student.lm.parameters())

    def of(self, rows: Sequence[Row]) -> tuple[list[list[int]], bool]:
        """The indices of the rows of each micro-batch, and whether rows of one prompt share it.

        A function of the rows alone. Ranks of a sharded student share together, because each pass gathers its layers.
        """
        limit, by_teacher, first = self._settings.micro_batch_tokens, self._by_teacher, self._shortest_first
        # The most that can be spared, asked first: to put groups together takes far longer.
        if self._shares() and (self._sharded or self._pays(rows, [range(len(rows))])):
            groups = split_groups(rows, limit, by_teacher=by_teacher, shortest_first=first)
            asked = [(self._pays(rows, groups), max((row.longest for row in rows), default=0))]
            asked = self._ranks.gather(asked[0]) if self._sharded else asked
            if any(pays for pays, _ in asked) and continues(self._student.lm, max(longest for _, longest in asked)):
                return groups, True
        turn = self._student.turn
        return split(rows, limit, turn=turn, by_teacher=by_teacher, shortest_first=first), False

    def _shares(self) -> bool:
        """Whether rows may share passes: not where what is done to a row depends on that row."""
        return self._settings.shared_prompts and not self._student.hooks and not self._student.dropout

    def _pays(self, rows: Sequence[Row], groups: Sequence[Sequence[int]]) -> bool:
        """Whether shared prompts make the update faster."""
        gpu = self._student.lm.device.type != "cpu"
        return pays(spared(rows, groups), positions(rows), len(groups), self._parameters, gpu=gpu)


def pays(spared: float, positions: float, parts: int, parameters: int, *, gpu: bool) -> bool:
    """Whether not to read `spared` of all positions again makes an update of so many micro-batches faster."""
    least = _LEAST_WORK["cuda" if gpu else "cpu"]
    return 0 < spared * parameters >= least * parts and spared * _LEAST_SHARE >= positions
