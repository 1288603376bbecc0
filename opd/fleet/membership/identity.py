"""What must be equal in all replicas of a teacher, and the election between replicas that differ."""

from collections.abc import Mapping
from dataclasses import dataclass

from opd.wire.v1 import teacher_pb2 as pb


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal for two replicas to be the same teacher: what `TeacherInfo` says that determines scores."""

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
        """The differing fields in words, "" if there are none; `self` is the replica's identity, `other` the pool's."""
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
    """The identity of a pool: the pinned weights if given, else the identity that most replicas have.

    Args:
        identities: by address.
        pinned: the weights hash that the settings demand, or "".

    Returns:
        The identity; None if no replica has the pinned weights, or two identities have equally many replicas.
    """
    votes: dict[Identity, int] = {}
    for identity in identities.values():
        if not pinned or identity.weights_hash == pinned:
            votes[identity] = votes.get(identity, 0) + 1
    ranked = sorted(votes.items(), key=lambda entry: -entry[1])
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]
