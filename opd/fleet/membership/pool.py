"""A teacher's pool: what its replicas must be and compute, and since when it has been unavailable."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from opd.errors import IncompatibleTeacherError, UndecidedTeacherError
from opd.fleet.membership.agreement import medoid
from opd.fleet.membership.identity import Identity, elect
from opd.wire.bounds import RequestBounds
from opd.wire.types import Head, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb


@dataclass(frozen=True, eq=False, slots=True)
class ScoredCheckRow:
    """A check row, and the [T] log-probs of its response tokens in nats."""

    row: ScoreItem
    log_probs: NDArray[np.float32]


@dataclass(eq=False)
class Pool:
    """One teacher, over all its replicas.

    Attributes:
        name: the teacher's name.
        info: its description, with the strictest limits of all replicas seen; None before the first.
        bounds: the same, as the bounds for checks of rows.
        identity: what every replica must be; None before the election.
        weights_hash: hash of the weights that a swap gave it; "" if there was none.
        era: number of calls of `adopt`; the result of a check that began in an earlier era is void.
        reference: a check row and its scores, by which replicas are judged; None before the first.
        undecided: why no identity could be elected; None if one was, or none was sought yet.
        heads: the fetched head, by content hash.
        head_lock: held while a head is fetched.
        down_since: time since when no replica is usable; None while one is.
        refused_since: time since when all usable replicas have refused calls as too busy; None while one takes rows.
        rows: number of rows submitted and not yet done.
    """

    name: str
    info: pb.TeacherInfo | None = None
    bounds: RequestBounds | None = None
    identity: Identity | None = None
    weights_hash: str = ""
    era: int = 0
    reference: ScoredCheckRow | None = None
    undecided: IncompatibleTeacherError | None = None
    heads: dict[str, Head] = field(default_factory=dict)
    head_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    down_since: float | None = None
    refused_since: float | None = None
    rows: int = 0

    @property
    def info_now(self) -> pb.TeacherInfo | None:
        """`info`, or None if it describes earlier weights: after `adopt`, until a replica has joined."""
        if self.info is None or self.identity is None or self.info.weights_hash != self.identity.weights_hash:
            return None
        return self.info

    @property
    def out_since(self) -> float | None:
        """Time since when no replica takes rows, for whatever reason; None while one does."""
        return self.refused_since if self.down_since is None else self.down_since

    def choose(self, seen: dict[str, pb.TeacherInfo], pinned: str = "") -> Identity:
        """The pool's identity. If there is none yet, it is elected among the replicas seen (address to description).

        An election without a result stays so, or a single replica of those seen could decide later.

        Raises:
            IncompatibleTeacherError: if no replica has the pinned weights.
            UndecidedTeacherError: if no side has a majority.
        """
        if self.identity is not None:
            return self.identity
        if self.undecided is not None:
            raise self.undecided.with_traceback(None)
        # A swap outranks the settings, which name the weights at the start.
        pinned = self.weights_hash or pinned
        identities = {address: Identity.of(info) for address, info in seen.items()}
        self.identity = elect(identities, pinned)
        if self.identity is None and pinned:
            found = ", ".join(f"{address} has {who.weights_hash[:12]}..." for address, who in identities.items())
            raise IncompatibleTeacherError(
                f"teacher {self.name!r} must have weights {pinned[:12]}..., but {found}; "
                "serve those weights or change expected_weights."
            )
        if self.identity is None:
            (first, agreed), *others = _sides(identities).items()
            each = "; ".join(
                f"{', '.join(addresses)} {'have' if len(addresses) > 1 else 'has'} "
                f"{identity.differences(first)} at {agreed[0]}"
                for identity, addresses in others
            )
            alike = f" (alike: {', '.join(agreed)})" if len(agreed) > 1 else ""
            raise UndecidedTeacherError(
                f"the replicas of teacher {self.name!r} are not the same and no side has a majority: {each}{alike}; "
                "stop one side or name the right weights in expected_weights."
            )
        return self.identity

    def join(self, info: pb.TeacherInfo) -> None:
        """Account for the limits and abilities of a replica that agrees: the pool can do what all replicas can do."""
        merged = pb.TeacherInfo()
        merged.CopyFrom(info)
        before = self.info_now  # the abilities of replicas before `adopt` do not count
        if before is not None:
            for name in info.limits.DESCRIPTOR.fields_by_name:
                one, other = getattr(before.limits, name), getattr(info.limits, name)
                setattr(merged.limits, name, min(one, other) or max(one, other))  # 0 stands for no limit
            # A row may move to any replica at any time, so what one of them cannot do is not offered.
            del merged.payloads[:]
            merged.payloads.extend(kind for kind in info.payloads if kind in before.payloads)
            merged.supports_spans = info.supports_spans and before.supports_spans
            merged.supports_temperature = info.supports_temperature and before.supports_temperature
            merged.deterministic = info.deterministic and before.deterministic
            merged.state = pb.TEACHER_STATE_READY
        self.info = merged
        self.bounds = RequestBounds.from_info(merged)

    def settle_reference(self, row: ScoreItem, vectors: list[NDArray[np.float32]]) -> ScoredCheckRow:
        """The reference. If there is none yet, the vector closest to the others, or the first of two, becomes it."""
        if self.reference is None:
            self.reference = ScoredCheckRow(row, vectors[medoid(vectors)])
        return self.reference

    def adopt(self, weights_hash: str = "") -> None:
        """Forget what the replicas must be; the next one to be checked decides, provided it has the given weights."""
        self.identity = self.reference = self.undecided = None
        self.weights_hash = weights_hash
        self.era += 1


def _sides(identities: dict[str, Identity]) -> dict[Identity, list[str]]:
    """The addresses of each identity, in the order in which they were seen."""
    sides: dict[Identity, list[str]] = {}
    for address, identity in identities.items():
        sides.setdefault(identity, []).append(address)
    return sides
