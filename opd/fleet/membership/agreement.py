"""Do the replicas of a teacher compute the same? Measured in nats, on rows that are drawn anew for every check.

Replicas that should be equal can differ by more than the signal of a distillation run, because of other kernels, other
dtypes, or a checkpoint that was rolled out to half of the pool. So replicas are compared on pseudo-random ids, which no
server knows beforehand, and on a share of the run's own rows (`opd.fleet.cross_score`).
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

_PROMPT = 8


class CheckRows:
    """Draws the rows on which replicas are compared, a new one for every check.

    Args:
        tokens: number of response tokens in a row.
        seed: makes the sequence of rows reproducible; None draws a seed that no server can foresee.
    """

    def __init__(self, tokens: int, seed: int | None = None) -> None:
        self._tokens = tokens
        self._rng = np.random.default_rng(secrets.randbits(128) if seed is None else seed)

    def draw(self, info: pb.TeacherInfo) -> ScoreItem:
        """A row of uniformly random ids within the teacher's vocabulary and limits."""
        most = info.limits.max_sequence_tokens or (_PROMPT + self._tokens)
        length = max(2, min(_PROMPT + self._tokens, most))
        # Below the tokenizer's size, because embedding rows beyond it are padding that was never trained.
        bound = max(1, min(info.tokenizer.size or info.vocab_size, info.vocab_size))
        return ScoreItem(self._rng.integers(0, bound, size=length, dtype=np.uint32), min(_PROMPT, length - 1))


def comparable_payload(info: pb.TeacherInfo) -> PayloadSpec | None:
    """The payload of check rows: sampled log-probs, else the top one; None if the teacher serves neither."""
    if pb.PAYLOAD_KIND_SAMPLED in info.payloads:
        return PayloadSpec.sampled()
    if pb.PAYLOAD_KIND_TOPK in info.payloads:
        return PayloadSpec(PayloadKind.TOPK, 1, "f32")
    return None


def sampled_log_probs(scores: Scores) -> NDArray[np.float32]:
    """[T] float32: log-probs of a check row's response tokens, in nats."""
    if scores.sampled is None:
        raise ValueError("scores have no sampled log-probs; a check row must be scored with a payload that has them")
    return np.asarray(scores.sampled, dtype=np.float32)


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Largest absolute difference, in nats, between two vectors of log-probs [T].

    Equal infinities differ by 0. Different lengths and NaN give inf.
    """
    return float(_distances(one, other[None])[0]) if one.shape == other.shape else float("inf")


def _distances(one: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float64]:
    """[N] distances of a vector [T] to each of the vectors [N, T]."""
    with np.errstate(invalid="ignore"):
        gap = np.where(one == others, 0.0, np.abs(one.astype(np.float64) - others.astype(np.float64)))
    return np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max(-1, initial=0.0)


def medoid(vectors: Sequence[NDArray[np.float32]]) -> int:
    """Index of the vector with the smallest median distance to the others.

    The median is used because one outlier cannot move it. Ties go to the first, so of two vectors the first one wins.
    """
    alike = {length: [i for i, v in enumerate(vectors) if len(v) == length] for length in {len(v) for v in vectors}}
    # Stacked by length: compared pair by pair, a pool of 1,000 replicas would take a million calls of numpy.
    stacked = {length: np.stack([vectors[i] for i in places]) for length, places in alike.items()}
    medians = []
    for i, mine in enumerate(vectors):
        found = np.full(len(vectors), np.inf)
        found[alike[len(mine)]] = _distances(mine, stacked[len(mine)])
        # Without the distance to itself, which is 0 and would lower every median.
        medians.append(float(np.median(np.delete(found, i))) if len(vectors) > 1 else 0.0)
    return int(np.argmin(medians))


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """How far apart the replicas of a teacher are on one row.

    Attributes:
        teacher: its name.
        tolerance: largest difference that counts as agreement, in nats.
        differences: by address, the largest |d log p| in nats to the pool's reference; inf for a wrong length.
        errors: by address, why a replica could not be asked.
    """

    teacher: str
    tolerance: float
    differences: Mapping[str, float]
    errors: Mapping[str, str]

    @property
    def agrees(self) -> bool:
        """Whether every replica answered within the tolerance."""
        return not self.errors and all(value <= self.tolerance for value in self.differences.values())

    def sentence(self) -> str:
        """The report in one sentence."""
        if not self.differences:
            return f"teacher {self.teacher!r}: none of its replicas could be compared."
        worst, count = max(self.differences, key=lambda key: self.differences[key]), len(self.differences)
        return (
            f"teacher {self.teacher!r}: {count} replica{'s' if count > 1 else ''}, largest difference "
            f"{self.differences[worst]:.3g} nats at {worst}, tolerance {self.tolerance:.3g} nats"
            + (f", {len(self.errors)} could not be compared." if self.errors else ".")
        )
