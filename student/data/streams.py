"""Random streams that do not depend on batching or order: one per row, named by what the row is.

A stream's key is a hash of (run seed, purpose, names...), so a rollout draws the same numbers whether its row is
sampled alone, in a batch, before or after a resume, or on another rank.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray


def stream(seed: int, *names: object) -> np.random.Generator:
    """A generator for the stream `names` of run `seed`; equal arguments give equal streams.

    Args:
        seed: the run's seed.
        names: what the stream is for, for example ("rollout", step, prompt uid, sample index).
    """
    text = "\x1f".join([str(seed), *map(str, names)])
    key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def uniforms(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """[count] float64 in (0, 1), one per token to sample; never exactly 0 or 1."""
    return (generator.integers(0, 2**52, size=count, dtype=np.uint64).astype(np.float64) + 0.5) / 2.0**52
