"""Counts what a run costs, in tokens, so that methods can be compared by everything they spend.

Metrics of a step, per purpose (train: the rows of the step; probe: rollouts that a controller measures with; gate:
evaluations by which a controller decides):

    cost/PURPOSE/sampled_tokens        response tokens sampled from the student, without text of environments
    cost/PURPOSE/expert_tokens, .../expert_positions    answers that an expert wrote, and their prompts
    cost/PURPOSE/decoded_positions     prompt and response positions of the student, forward only
    cost/PURPOSE/gradient_positions    positions of the student, forward and backward
    cost/PURPOSE/teacher_positions     prompt and response positions scored by teachers, once per request
    cost/PURPOSE/reference_positions   the same for the reference
    cost/PURPOSE/local_positions       the same for the student and copies of it that score in process, forward only

Rows that the fleet scores twice to compare replicas (0.5 %) are not counted here, because they depend on the number of
replicas; opd_student_fleet_checked_tokens_total counts them.

A model of P parameters spends about 2 P FLOPs per position in the forward and 4 P in the backward pass (arXiv
2001.08361). Evaluations that are only reported are not counted, because every run has the same ones.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

from student.data.row import Row

Purpose = Literal["train", "probe", "gate"]


def positions(rows: Sequence[Row]) -> int:
    """Number of prompt and response positions of `rows`, over all windows of each."""
    return sum(row.positions for row in rows)


def _written(row: Row) -> int:
    """Response tokens of a row, without tokens of the environment, of replayed actions or of a shared beginning."""
    shared = row.turns[: int(row.notes.get("branched", 0.0))]
    return int(row.written.sum()) - sum(end - start for start, end in shared)


class Costs:
    """Counts since the last `take`, on this rank."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, float] = defaultdict(float)

    def add(self, purpose: Purpose, name: str, tokens: float) -> None:
        """Count `tokens` as cost/`purpose`/`name`."""
        self._counts[f"cost/{purpose}/{name}"] += tokens

    def sampled(self, purpose: Purpose, rows: Sequence[Row]) -> None:
        """Count a rollout; answers that an expert wrote are counted separately, and replayed rows cost nothing."""
        own = [row for row in rows if row.origin in ("policy", "hinted", "branch")]
        expert = [row for row in rows if row.origin == "expert"]
        self.add(purpose, "sampled_tokens", sum(map(_written, own)))
        self.add(purpose, "decoded_positions", positions(own))
        if expert:
            self.add(purpose, "expert_tokens", sum(map(_written, expert)))
            self.add(purpose, "expert_positions", positions(expert))

    def scored(self, purpose: Purpose, by_role: Mapping[str, int]) -> None:
        """Count the positions of requests by role, as returned by `Scoring.positions`."""
        for role, count in by_role.items():
            self.add(purpose, f"{role}_positions", count)

    def trained(self, purpose: Purpose, rows: Sequence[Row], *, shared: float = 0.0) -> None:
        """Count forward and backward passes over `rows`, of whose positions `shared` were not read again."""
        self.add(purpose, "gradient_positions", positions(rows) - shared)

    def merge(self, counts: Mapping[str, float]) -> None:
        """Add the counts that another counter returned."""
        for name, value in counts.items():
            self._counts[name] += value

    def take(self) -> dict[str, float]:
        """Return the counts as metrics, and reset them."""
        counts, self._counts = self._counts, defaultdict(float)
        return dict(sorted(counts.items()))
