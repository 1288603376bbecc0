"""Figures of an evaluation: unbiased pass@k, confidence intervals over prompts, and shares of repeated 4-grams."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NORMAL_95 = 1.96
_GRAM = 4


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Estimate the probability that at least one of k answers is correct, from c = `correct` of n = `samples` answers.

    The estimate is 1 - C(n - c, k) / C(n, k), which is unbiased for every k up to n (arXiv 2107.03374). It is computed
    as a product, which does not overflow.

    Raises:
        ValueError: when k is not in 1..samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"k must be in 1..{samples}, but it is {k}")
    if samples - correct < k:  # any k answers contain a correct one
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def ks_up_to(samples: int) -> list[int]:
    """The values of k for which pass@k is shown: the powers of two up to `samples`, and `samples` itself, ascending."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of the mean of `values`, by the normal approximation.

    If all values are 0, or all are 1, their sample variance is 0, although the next prompt may well differ. The result
    is then the width of the Wilson interval, z^2 / (n + z^2), which there extends to one side only.

    Args:
        values: one share in [0, 1] per prompt, because answers to the same prompt are not independent.

    Returns:
        The half-width; None for fewer than two values.
    """
    if len(values) < 2:
        return None
    if set(values) in ({0.0}, {1.0}):
        return _NORMAL_95**2 / (len(values) + _NORMAL_95**2)
    return _NORMAL_95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def repetition(ids: NDArray[np.uint32]) -> float:
    """Share of the 4-grams of a response that occur earlier in it: 0 for none, close to 1 for a loop.

    A student can agree with its teacher by running in loops (arXiv 2608.09836), which the divergence does not show.

    Args:
        ids: [T] token ids of the response. The result is 0 for fewer than five.
    """
    grams = _grams(ids)
    return 1.0 - len(set(grams)) / len(grams) if len(grams) > 1 else 0.0


def quoted(response: NDArray[np.uint32], hint: NDArray[np.uint32], prompt: NDArray[np.uint32]) -> float:
    """Share of the 4-grams of a response that occur in a hint but not in the student's own prompt.

    A student that learns from a teacher with a hint may come to recite what it was never shown (arXiv 2607.05184).

    Args:
        response: [T] token ids of the response. The result is 0 for fewer than four.
        hint: [P'] token ids that a teacher read in place of the prompt.
        prompt: [P] token ids that the student read.
    """
    grams = _grams(response)
    hinted = set(_grams(hint)) - set(_grams(prompt))
    return sum(gram in hinted for gram in grams) / len(grams) if grams else 0.0


def _grams(ids: NDArray[np.uint32]) -> list[tuple[int, ...]]:
    values = ids.tolist()
    return list(zip(*(values[i:] for i in range(_GRAM)), strict=False))  # up to the end of the shortest
