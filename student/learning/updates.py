"""Which optimizer updates a batch of rows gets: epochs of minibatches, and what a method makes of them.

    for epoch in range(train.epochs):        every pass in an order of its own
        for part in range(train.minibatches):    whole groups, cut by a stream of (seed, "updates", step, epoch)
            learner.update(rows of the part)

With one epoch and one minibatch this is a single update on all rows, strictly on policy: every importance ratio is 1.
The weights move from the first update on, so a step is never interrupted between updates, and once one has been made
the step counts as done, whatever happens to those after it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from opd.errors import OpdError
from student.data.row import Row
from student.data.streams import stream
from student.learning.learner import Learner
from student.learning.objective import Metrics
from student.learning.ranks import Ranks
from student.run.costs import Costs

Reread = Callable[[Sequence[Row]], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer update.

    Attributes:
        rows: this rank's rows; it may have none while others have some.
        recompute: read the rows' signals of role "student" again before it, so that old log-probs (`ratio_to: old`)
            are those of the weights that the update starts from; the same on every rank.
    """

    rows: tuple[Row, ...]
    recompute: bool = False


@dataclass
class Updated:
    """The result of the updates of a step.

    Attributes:
        sums: metrics as (numerator, denominator), added over the updates.
        made: optimizer updates made.
        skipped: updates for which no rank had a row.
        failure: what ended them after the first had been made; the step counts as done, and the run stops after it.
    """

    sums: Metrics = field(default_factory=dict)
    made: int = 0
    skipped: int = 0
    failure: OpdError | None = None

    def metrics(self) -> dict[str, float]:
        """Means over the updates, each by its own denominator; metrics without a measurement are absent."""
        found = {name: top / bottom for name, (top, bottom) in self.sums.items() if bottom}
        return found | {"updates": float(self.made), "updates_skipped": float(self.skipped)}


def plan_updates(
    rows: Sequence[Row], *, epochs: int, minibatches: int, seed: int, step: int, ranks: Ranks
) -> Iterator[Update]:
    """`epochs` passes over the rows of all ranks, each in `minibatches` parts of whole groups.

    The parts are cut from the groups of all ranks, so they do not depend on how rows are spread over ranks, and every
    rank makes equally many updates.

    Args:
        rows: this rank's rows.
        epochs: passes.
        minibatches: updates of a pass.
        seed: the run's seed.
        step: the step, which names the order of the groups.
        ranks: all ranks.
    """
    if epochs == minibatches == 1:
        yield Update(tuple(rows))
        return
    mine: dict[str, list[Row]] = {}
    for row in rows:
        mine.setdefault(row.key.group, []).append(row)
    # Sorted, so that every rank gives a group the same number and cuts the same minibatches.
    groups = sorted(set().union(*ranks.gather(list(mine))))
    for epoch in range(epochs):
        order = stream(seed, "updates", step, epoch).permutation(len(groups))
        for part in range(minibatches):
            # Strided, so that the sizes of minibatches differ by one group at most.
            chosen = {groups[int(i)] for i in order[part::minibatches]}
            # Rows keep the order they came in: it decides the sums of a micro-batch.
            yield Update(tuple(row for row in rows if row.key.group in chosen))


def make_updates(learner: Learner, updates: Iterable[Update], step: int, costs: Costs, reread: Reread) -> Updated:
    """Make the updates of a step.

    Args:
        learner: makes them.
        updates: taken one after the other, so that a method can look at the student between two.
        step: the step; its learning rate is that of all its updates.
        costs: counts the passes.
        reread: reads signals of role "student" again; returns positions by role.

    Raises:
        OpdError: when not even the first update could be made; weights and optimizer are as they were before.
    """
    found = Updated()
    try:
        for update in updates:
            if update.recompute:
                costs.scored("train", reread(update.rows))
            sums = learner.update(update.rows, step)
            if sums is None:  # no pass was made
                found.skipped += 1
                continue
            costs.trained("train", update.rows)
            found.made += 1
            for name, (top, bottom) in sums.items():
                old = found.sums.get(name, (0.0, 0.0))
                found.sums[name] = (old[0] + top, old[1] + bottom)
    except OpdError as error:
        # Nothing has moved before the first update, so the step may be taken again; after it, it may not.
        if not found.made:
            raise
        found.failure = error
    return found
