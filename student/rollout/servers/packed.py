"""Weights that are ready for rollout servers before they are told to take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from student.rollout.known_row import LikelyIds
    from student.rollout.servers.engine import ServersEngine
    from student.rollout.servers.held import HeldWeights


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights that servers can be given; see `student.rollout.engine.PackedWeights`.

    Attributes:
        engine: whose they are.
        label: hash of the weights.
        source: their folder, or the tensors themselves where they travel over NCCL.
        version: steps that they have seen.
        expected: [8, V] log-probs of every id after each beginning of the known row, as the student gives them.
        likely: finds candidates with them, where the servers do not.
    """

    engine: ServersEngine
    label: str
    source: Path | HeldWeights
    version: int
    expected: NDArray[np.float32]
    likely: LikelyIds | None = None

    def load(self) -> None:
        """See `PackedWeights.load`."""
        self.engine.load(self)

    def drop(self) -> None:
        """See `PackedWeights.drop`."""
        self.engine.drop(self)
