"""Measures how far the rollout engine's log-probs are from the student's, which never agree exactly.

    d_t = log p(y_t) - log q(y_t)        p: the student's forward pass as in training, with the weights that sampled
                                         q: the distribution that the engine sampled from

    mismatch/log_ratio       mean |d|, nats
    mismatch/max_log_ratio   the largest |d|, nats
    mismatch/kl              mean of e^d - 1 - d, nats: an unbiased estimate of KL(q || p) from samples of q (k3 in
                             http://joschu.net/blog/kl-approx.html)

It is measured in each step before the first update, on the first rows that the student sampled, in the precision and
the mode (`model.dropout`) in which the learner runs. If rows are sampled ahead (`train.max_staleness`), p has the older
weights that sampled them, so that learning since then is not counted as mismatch. Losses correct for the mismatch by
the ratio to the policy that sampled (`ratio_to: behaviour`, `importance_cap`). Above `rollout.engine.mismatch_limit`
the run stops, because either the engine or the student's pass must then be wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from opd.errors import RolloutEngineError
from student.data.costs import Costs
from student.data.needs import STUDENT
from student.data.row import Row
from student.model.ranks import Ranks
from student.rollout.engine import RolloutEngineSettings
from student.scoring.local import LocalModels


class Mismatch:
    """Measures the mismatch of each step.

    Args:
        settings: the engine's settings.
        local: runs the student as a scoring model.
        ranks: all ranks, which measure together.
        precision: makes the autocast context of the learner's forward pass.
        costs: counts the tokens that are read.
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
        """Metrics of a step; empty if nothing is measured. All ranks must call it.

        Args:
            rows: this rank's sampled rows.
            version: version (steps trained) of the weights to compare with; rows of other weights are left out.
            weights: those weights, trained tensors by name; None for the student's current weights.

        Raises:
            RolloutEngineError: on every rank, if the mean |d| is above the limit.
        """
        if not self._settings.mismatch_rows:
            return {}
        parts = self._ranks.gather(self._sums(rows, version, weights))
        tokens = sum(part[0] for part in parts)
        if not tokens:
            return {}
        mean = sum(part[1] for part in parts) / tokens
        limit = self._settings.mismatch_limit
        if limit is not None and not mean <= limit:  # written so that NaN is above every limit
            raise RolloutEngineError(
                f"the student's log-probs of the tokens that rollout engine {self._settings.name!r} sampled differ "
                f"from the engine's by {mean:.3g} nats per token on average, over rollout.engine.mismatch_limit "
                f"{limit:g}, so one of the two computes a different model; raise the limit only if the engine's lower "
                "precision explains the difference."
            )
        kl = sum(part[2] for part in parts) / tokens
        largest = max(part[3] for part in parts)
        return {"mismatch/log_ratio": mean, "mismatch/max_log_ratio": largest, "mismatch/kl": kl}

    def _sums(
        self, rows: Sequence[Row], version: int, weights: Mapping[str, Tensor] | None
    ) -> tuple[int, float, float, float]:
        """Number of tokens, sum of |d|, sum of e^d - 1 - d, and the largest |d|, of this rank."""
        fresh = [row for row in rows if row.on_policy and bool((_sampled(row, version)).any())]
        chosen = fresh[: self._settings.mismatch_rows]
        self._costs.add("train", "local_positions", sum(row.positions for row in chosen))
        with self._precision(), nullcontext() if weights is None else self._local.kept.holding(weights):
            scores = self._local.score(STUDENT, chosen, learning=True)
        gaps = [np.zeros(0)]
        for row, score in zip(chosen, scores, strict=True):
            if score.sampled is None:
                raise TypeError("the student's own log-probs are missing")
            gap = score.sampled.astype(np.float64) - row.behaviour_logp
            gaps.append(gap[_sampled(row, version)])
        every = np.concatenate(gaps)
        if not len(every):
            return 0, 0.0, 0.0, 0.0
        # The KL is estimated by e^d - 1 - d, which is never negative, while the mean of -d may be negative by noise.
        size = np.abs(every)
        return len(every), float(size.sum()), float((np.expm1(every) - every).sum()), float(size.max())


def _sampled(row: Row, version: int) -> np.ndarray:
    """[T] bool, the tokens that the student sampled with the weights of `version`."""
    own: np.ndarray = np.isfinite(row.behaviour_logp) & (row.policy_version == version)
    return own
