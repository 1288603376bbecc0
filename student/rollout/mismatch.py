"""How far the rollout engine's log-probs are from the student's: two implementations of a model never quite agree.

    d_t = log p(y_t) - log q(y_t)        p: the student's forward as it trains, with the weights that sampled
                                         q: what the engine drew from

    mismatch/log_ratio       mean |d|, nats
    mismatch/max_log_ratio   the largest |d|, nats
    mismatch/kl              mean of e^d - 1 - d: KL(q || p) without bias, from tokens of q (the k3 of
                             http://joschu.net/blog/kl-approx.html)

Measured each step before the first update, on the first rows of the step that the student sampled, in the precision
that the learner runs in; where rows are sampled ahead (`train.max_staleness`), with the older weights in place of the
student's, so that what it learnt since is not counted. Losses correct for it by the ratio to the policy that sampled
(`ratio_to: behaviour`, `importance_cap`); beyond `rollout.engine.mismatch_limit` the run stops, because one of the two
is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from opd.errors import RolloutEngineError
from student.data.row import Row
from student.learning.ranks import Ranks
from student.rollout.engine import RolloutEngineSettings
from student.run.costs import Costs
from student.scoring.local import LocalModels
from student.scoring.needs import STUDENT


class Mismatch:
    """Measures the mismatch of each step.

    Args:
        settings: of the engine.
        local: the student as a model that scores.
        ranks: which all measure together.
        precision: makes the context in which the learner's forward runs.
        costs: where what is read is counted.
    """

    def __init__(
        self,
        settings: RolloutEngineSettings,
        local: LocalModels,
        ranks: Ranks,
        precision: Callable[[], Any],
        costs: Costs,
    ) -> None:
        self._settings, self._local, self._ranks, self._costs = settings, local, ranks, costs
        self._precision = precision

    def measure(
        self, rows: Sequence[Row], version: int, weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Metrics of a step; empty where nothing is measured. All ranks must call it.

        Args:
            rows: this rank's sampled rows.
            version: steps that the weights to compare with have seen; rows of other weights are left out.
            weights: these, the trained tensors by name; None for the student's own.

        Raises:
            RolloutEngineError: when the mean is over the limit, on every rank.
        """
        if not self._settings.mismatch_rows:
            return {}
        found = self._ranks.gather(self._sums(rows, version, weights))
        tokens = sum(part[0] for part in found)
        if not tokens:
            return {}
        mean = sum(part[1] for part in found) / tokens
        limit = self._settings.mismatch_limit
        if limit is not None and not mean <= limit:  # NaN is over every limit
            raise RolloutEngineError(
                f"the student's log-probs of what rollout engine {self._settings.name!r} sampled are {mean:.3g} nats "
                f"from the engine's in the mean, over rollout.engine.mismatch_limit {limit:g}: one of the two computes "
                "another model; raise the limit only for a precision that explains it."
            )
        kl = sum(part[2] for part in found) / tokens
        largest = max(part[3] for part in found)
        return {"mismatch/log_ratio": mean, "mismatch/max_log_ratio": largest, "mismatch/kl": kl}

    def _sums(
        self, rows: Sequence[Row], version: int, weights: Mapping[str, Tensor] | None
    ) -> tuple[int, float, float, float]:
        """Tokens, sum of |d|, sum of e^d - 1 - d, and the largest |d|, of this rank."""
        fresh = [row for row in rows if row.on_policy and bool((_sampled(row, version)).any())]
        chosen = fresh[: self._settings.mismatch_rows]
        self._costs.add("train", "local_positions", sum(row.positions for row in chosen))
        with self._precision(), nullcontext() if weights is None else self._local.holding(weights):
            scores = self._local.score(STUDENT, chosen)
        gaps = [np.zeros(0)]
        for row, score in zip(chosen, scores, strict=True):
            if score.sampled is None:
                raise TypeError("the student's own log-probs are missing")
            gap = score.sampled.astype(np.float64) - row.behaviour_logp
            gaps.append(gap[_sampled(row, version)])
        every = np.concatenate(gaps)
        if not len(every):
            return 0, 0.0, 0.0, 0.0
        # Besides |d|, the estimate of KL(engine || student) that is never negative: the mean of -d may be, by noise.
        size = np.abs(every)
        return len(every), float(size.sum()), float((np.expm1(every) - every).sum()), float(size.max())


def _sampled(row: Row, version: int) -> np.ndarray:
    """[T] where the student sampled, with the weights of `version`."""
    own: np.ndarray = np.isfinite(row.behaviour_logp) & (row.policy_version == version)
    return own
