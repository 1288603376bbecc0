"""Do the replicas of one teacher agree? By what they say they are, and by what they compute on one probe.

Replicas that should be equal differ in practice by more than the signal of a distillation run: other kernels, other
dtypes, a checkpoint that was rolled out to half of the pool. So identity is compared field by field, and every
replica scores the same fixed pseudo-random ids; the measure is max |log p_replica - log p_pool| in nats.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

_PROBE_PROMPT = 8


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal for two replicas to be one teacher."""

    weights_hash: str
    tokenizer: str
    chat_template: str
    vocab_size: int
    compute_dtype: str
    head: str
    logit_scale: float
    soft_cap: float

    @classmethod
    def of(cls, info: pb.TeacherInfo) -> "Identity":
        """The identity in a description."""
        return cls(
            weights_hash=info.weights_hash,
            tokenizer=info.tokenizer.fingerprint,
            chat_template=info.tokenizer.chat_template_hash,
            vocab_size=info.vocab_size,
            compute_dtype=pb.Dtype.Name(info.compute_dtype).removeprefix("DTYPE_").lower(),
            head=info.head.hash,
            logit_scale=info.head.logit_scale,
            soft_cap=info.head.soft_cap,
        )

    def differences(self, other: "Identity") -> str:
        """The differing fields in words, "" when there are none; `self` is the replica, `other` the pool."""
        found = [
            f"{name} {_short(getattr(self, name))} instead of {_short(getattr(other, name))}"
            for name in self.__slots__
            if getattr(self, name) != getattr(other, name)
        ]
        return ", ".join(found)


def _short(value: object) -> str:
    text = str(value)
    return (text[:12] + "..." if len(text) > 16 else text) or "none"


def elect(identities: Mapping[str, Identity], pinned: str = "") -> Identity | None:
    """The identity of a pool: the pinned weights if given, else that of more replicas than any other.

    Args:
        identities: by address.
        pinned: weights hash that the settings demand, or "".

    Returns:
        The identity, or None when no replica has the pinned weights or two identities have equally many replicas.
    """
    votes: dict[Identity, int] = {}
    for identity in identities.values():
        if not pinned or identity.weights_hash == pinned:
            votes[identity] = votes.get(identity, 0) + 1
    ranked = sorted(votes.items(), key=lambda entry: -entry[1])
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]


def probe_item(info: pb.TeacherInfo, tokens: int) -> ScoreItem:
    """The probe of a teacher: fixed pseudo-random ids, the same in every process, of `tokens` response tokens."""
    most = info.limits.max_sequence_tokens or (_PROBE_PROMPT + tokens)
    length = max(2, min(_PROBE_PROMPT + tokens, most))
    bound = max(1, min(info.tokenizer.size or info.vocab_size, info.vocab_size))
    seed = int.from_bytes(hashlib.sha256(info.name.encode()).digest()[:8], "little")
    ids = np.random.default_rng(seed).integers(0, bound, size=length, dtype=np.uint32)
    return ScoreItem(ids, min(_PROBE_PROMPT, length - 1))


def probe_spec(info: pb.TeacherInfo) -> PayloadSpec | None:
    """The payload of the probe: sampled log-probs, else the top one, else None: nothing comparable in nats."""
    if pb.PAYLOAD_KIND_SAMPLED in info.payloads:
        return PayloadSpec.sampled()
    if pb.PAYLOAD_KIND_TOPK in info.payloads:
        return PayloadSpec(PayloadKind.TOPK, 1, "f32")
    return None


def probe_vector(scores: Scores) -> NDArray[np.float32]:
    """[T] float32: log-probs of the probe's response tokens, nats."""
    if scores.sampled is None:
        raise ValueError("scores: a probe answer must carry sampled log-probs, but it has none")
    return np.asarray(scores.sampled, dtype=np.float32)


def distance(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Largest absolute difference in nats; inf for different lengths; equal infinities differ by 0."""
    if one.shape != other.shape:
        return float("inf")
    if not len(one):
        return 0.0
    same = one == other
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(one.astype(np.float64) - other.astype(np.float64)))
    return float(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).max())


def medoid(vectors: Sequence[NDArray[np.float32]]) -> int:
    """Index of the vector with the smallest median distance to the others: one odd replica cannot become the rule."""
    medians = [
        float(np.median([distance(mine, other) for j, other in enumerate(vectors) if j != i] or [0.0]))
        for i, mine in enumerate(vectors)
    ]
    return int(np.argmin(medians))


@dataclass(frozen=True, slots=True)
class AgreementReport:
    """How far the replicas of a teacher are apart on the probe.

    Attributes:
        teacher: its name.
        tolerance: in nats.
        differences: address to max |dlogp| in nats against the pool's reference; inf for an answer of wrong length.
        errors: address to the sentence of a replica that could not be asked.
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
            return f"teacher {self.teacher!r}: no replica could be compared."
        worst = max(self.differences, key=lambda key: self.differences[key])
        return (
            f"teacher {self.teacher!r}: {len(self.differences)} replicas, largest difference "
            f"{self.differences[worst]:.3g} nats at {worst}, tolerance {self.tolerance:.3g} nats"
            + (f", {len(self.errors)} could not be asked." if self.errors else ".")
        )
