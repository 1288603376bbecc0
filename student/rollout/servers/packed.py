"""Weights that are prepared for rollout servers, which are told to load them later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from student.rollout.known_row import LikelyIds
    from student.rollout.servers.held import HeldWeights


class Loads(Protocol):
    """An engine of rollout servers, as its packed weights see it."""

    def load(self, packed: Packed) -> None:
        """Make the servers sample with these weights from now on."""

    def drop(self, packed: Packed) -> None:
        """Stop keeping these weights for servers that come back."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Weights for servers; implements `student.rollout.engine.PackedWeights`.

    Attributes:
        engine: the engine that they belong to.
        label: hash of the weights.
        source: their folder, or the tensors themselves if they are sent over NCCL.
        version: number of steps that they have been trained for.
        expected: [8, V] the student's log-probs of every id after each beginning of the known row, nats.
        likely: finds candidates with these weights if the servers cannot; otherwise None.
    """

    engine: Loads
    label: str
    source: Path | HeldWeights
    version: int
    expected: NDArray[np.float32]
    likely: LikelyIds | None = None

    def load(self) -> None:
        """Make the engine sample from these weights from now on."""
        self.engine.load(self)

    def drop(self) -> None:
        """Release the weights, which will not be loaded again."""
        self.engine.drop(self)
