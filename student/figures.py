"""Figures of an evaluation: pass@k without bias, intervals over prompts, repetition."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NORMAL_95 = 1.96
_GRAM = 4


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Probability that at least one of k answers is correct, from `correct` of `samples` answers.

    1 - C(n - c, k) / C(n, k), which is unbiased for every k up to n (arXiv 2107.03374), computed as a product, which
    does not overflow.

    Raises:
        ValueError: when k is not in 1..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be in 1..{samples}, but it is {k}")
    if samples - correct < k:  # any k answers contain a correct one
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def ks_up_to(samples: int) -> list[int]:
    """The k of pass@k that are shown for `samples` answers per prompt: powers of two and `samples` itself."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of a 95 % interval of the mean of `values`, by the normal approximation; None below two values.

    The values are one per prompt, shares in [0, 1]: answers to one prompt are not independent of each other. Where all
    are 0, or all are 1, they have no spread to approximate by, and yet the next prompt may be another one: this is then
    the reach of Wilson's interval, z^2 / (n + z^2), as for a coin that always fell on one side.
    """
    if len(values) < 2:
        return None
    if set(values) in ({0.0}, {1.0}):
        return _NORMAL_95**2 / (len(values) + _NORMAL_95**2)
    return _NORMAL_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def repetition(ids: NDArray[np.uint32]) -> float:
    """Share of the 4-grams of a response that occur earlier in it: 0 for none, towards 1 for a loop.

    Students can agree with their teacher by running in loops (arXiv 2608.09836), which the divergence does not show.

    Args:
        ids: [T] ids of the response; 0 for fewer than five.
    """
    grams = _grams(ids)
    return 1.0 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def quoted(response: NDArray[np.uint32], hint: NDArray[np.uint32], prompt: NDArray[np.uint32]) -> float:
    """Share of the 4-grams of a response that stand in a hint and not in the student's own prompt.

    A student that learns from a teacher with a hint may come to recite what it was never shown (arXiv 2607.05184).

    Args:
        response: [T] ids; 0 for fewer than four.
        hint: [P'] ids that a teacher read in place of the prompt.
        prompt: [P] ids that the student read.
    """
    grams = _grams(response)
    told = set(_grams(hint)) - set(_grams(prompt))
    return sum(gram in told for gram in grams) / len(grams) if grams else 0.0


def _grams(ids: NDArray[np.uint32]) -> list[tuple[int, ...]]:
    values = ids.tolist()
    return list(zip(*(values[i:] for i in range(_GRAM)), strict=False))  # up to the end of the shortest
