"""Random streams that do not depend on batching or order: one per row, keyed by the row's identity.

A stream's key is a hash of (run seed, purpose, names...), so a row draws the same numbers whether it is sampled alone,
in a batch, after a resume, or on another rank. Philox (Salmon et al., 2011) is counter-based: every key is an
independent stream, and there is no generator state to checkpoint.
"""

import hashlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray


class _Key(ISeedSequence):
    """A Philox key as a seed sequence; with argument `key`, numpy would also draw an unused seed from the system."""

    def __init__(self, key: NDArray[np.uint64]) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:  # type: ignore[override]
        """The key; Philox asks for its two words."""
        return self._key


def stream(seed: int, *names: object) -> np.random.Generator:
    """A generator for the stream `names` of run `seed`; equal arguments give equal streams.

    Args:
        seed: the run's seed.
        names: what the stream is for, for example ("rollout", step, prompt uid, sample index).
    """
    # The separator does not occur in names, so ("a", "bc") and ("ab", "c") are different streams. The built-in hash()
    # is salted per process and cannot be used.
    text = "\x1f".join([str(seed), *map(str, names)])
    key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(_Key(key)))  # type: ignore[arg-type]  # numpy takes any ISeedSequence


def uniforms(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """[count] float64 in (0, 1), one per token to sample; never exactly 0 or 1."""
    # The midpoints of 2**52 equal cells are exact in float64, and their logarithms are finite.
    return (generator.integers(0, 2**52, size=count, dtype=np.uint64).astype(np.float64) + 0.5) / 2.0**52
