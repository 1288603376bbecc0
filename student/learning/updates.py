"""The optimizer updates of a step: epochs of minibatches, or whatever a method makes of them.

    for epoch in range(train.epochs):            each epoch shuffles the groups with the stream
        for part in range(train.minibatches):    (seed, "updates", step, epoch); minibatches are whole groups
            learner.update(rows of the part)

With one epoch and one minibatch this is a single update on all rows, strictly on policy: every importance ratio is 1.
The first update moves the weights. A step is therefore never interrupted between updates, and counts as done once one
update has been made, even if a later one fails.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opd.errors import OpdError
from student.data.costs import Costs
from student.data.row import Row
from student.data.streams import stream
from student.learning.blame import blaming
from student.learning.learner import Learner
from student.learning.objective import Metrics, quotients
from student.model.ranks import Ranks

Reread = Callable[[Sequence[Row]], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update.

    Attributes:
        rows: this rank's rows; may be empty while other ranks have some.
        recompute: whether to recompute the rows' signals of role "student" first, so that old log-probs
            (`ratio_to: old`) are under the weights that the update starts from; the same on every rank.
    """

    rows: tuple[Row, ...]
    recompute: bool = False


@dataclass
class Updated:
    """The result of the updates of a step.

    Attributes:
        sums: metrics as (numerator, denominator), summed over the updates.
        made: number of updates made.
        skipped: number of updates skipped because no rank had a row to learn from.
        failure: the error of an update after the first; the step counts as done, and the run stops after it.
    """

    sums: Metrics = field(default_factory=dict)
    made: int = 0
    skipped: int = 0
    failure: OpdError | None = None

    def metrics(self) -> dict[str, float]:
        """The quotients of the sums, and how many updates were made and skipped."""
        return quotients(self.sums) | {"updates": float(self.made), "updates_skipped": float(self.skipped)}


def plan_updates(
    rows: Sequence[Row], *, epochs: int, minibatches: int, seed: int, step: int, ranks: Ranks
) -> Iterator[Update]:
    """Yield the updates of `epochs` passes over the rows of all ranks, each in `minibatches` parts of whole groups.

    The parts are cut from the groups of all ranks. They therefore do not depend on how rows are spread over ranks, and
    every rank makes the same number of updates.

    Args:
        rows: this rank's rows.
        epochs: number of passes.
        minibatches: updates per pass.
        seed: the run's seed.
        step: the step; with seed and epoch it determines the order of the groups.
        ranks: all ranks.
    """
    if epochs == minibatches == 1:
        yield Update(tuple(rows))
        return
    mine: dict[str, list[Row]] = {}
    for row in rows:
        mine.setdefault(row.key.group, []).append(row)
    # Sorted, so that every rank numbers the groups alike and cuts the same minibatches.
    groups = sorted(set().union(*ranks.gather(list(mine))))
    for epoch in range(epochs):
        order = stream(seed, "updates", step, epoch).permutation(len(groups))
        for part in range(minibatches):
            # Strided, so that minibatches differ in size by at most one group.
            chosen = {groups[int(i)] for i in order[part::minibatches]}
            # Rows keep their order, on which the rounding of a micro-batch's sums depends.
            yield Update(tuple(row for row in rows if row.key.group in chosen))


def make_updates(learner: Learner, updates: Iterable[Update], step: int, costs: Costs, reread: Reread) -> Updated:
    """Make the updates of a step.

    Args:
        learner: makes them.
        updates: consumed lazily, so that a method can look at the student between two of them.
        step: the step; all its updates share one learning rate.
        costs: counts what was trained on and scored.
        reread: recomputes signals of role "student"; returns the number of positions read, by role.

    Raises:
        OpdError: if the first update fails; weights and optimizer are then unchanged.
    """
    updated = Updated()
    try:
        with blaming(learner.ranks.count):
            for update in updates:
                if update.recompute:
                    costs.scored("train", reread(update.rows))
                sums = learner.update(update.rows, step)
                if sums is None:  # no pass was made
                    updated.skipped += 1
                    continue
                costs.trained(
                    "train", update.rows, shared=sums.get("positions_shared", (0.0,))[0] / learner.ranks.count
                )
                updated.made += 1
                for name, (top, bottom) in sums.items():
                    old = updated.sums.get(name, (0.0, 0.0))
                    updated.sums[name] = (old[0] + top, old[1] + bottom)
    except OpdError as error:
        # Before the first update nothing has moved, and the step may be taken again; afterwards it may not.
        if not updated.made:
            raise
        updated.failure = error
    return updated
