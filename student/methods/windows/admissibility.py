"""Which windows are admissible: cosines between prefix gradients and the full gradient, from one Gram matrix.

Let G[f, s, f', s'] be the inner products of the gradients of fold f and segment s, and g_L the sum of the segments up
to window L. The published criterion (arXiv 2605.28396) is

    published(L) = <g_L, g> / (|g_L| |g|)                          all folds together

It is inflated: g_L and g share their tokens, so that even if every token's gradient were independent noise it would be
sqrt(tokens in L / tokens). Inner products of different folds share no tokens and estimate those of the expected
gradients without bias, so

    cross_fitted(L) = <g_L, g>' / sqrt(<g_L, g_L>' <g, g>')        ' = over pairs of different folds

estimates the cosine of the expected gradients (not itself unbiased: it is a ratio). Where an estimated squared norm is
not positive the signal has drowned in noise; the cosine is then nan and the window not admissible. Cross-fitting is our
addition; the paper does not have it.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def _prefix_products(gram: F64, pairs: F64) -> tuple[F64, F64, float]:
    """Sums over `pairs` of folds of <g_L, g>, <g_L, g_L> [S] each, and <g, g>."""
    summed = np.einsum("fsgt,fg->st", gram, pairs)
    # g_L is a sum of segments, so its products are two-dimensional prefix sums of those of the segments.
    prefix = summed.cumsum(0).cumsum(1)
    return prefix[:, -1], np.diagonal(prefix).copy(), float(prefix[-1, -1])


def published(gram: Float64[np.ndarray, "f s f s"]) -> Float64[np.ndarray, " s"]:
    """The published cosine of each window with the whole; 1 for the last, nan where a gradient is zero."""
    folds = gram.shape[0]
    cross, own, full = _prefix_products(gram, np.ones((folds, folds)))
    return _ratio(cross, own, full)


def cross_fitted(gram: Float64[np.ndarray, "f s f s"]) -> Float64[np.ndarray, " s"]:
    """The cross-fitted cosine of each window with the whole; may exceed 1 by noise, nan where there is no signal.

    Raises:
        ValueError: with fewer than two folds.
    """
    folds = gram.shape[0]
    if folds < 2:
        raise ValueError(f"gram has {folds} folds; cross-fitting needs at least 2")
    # Off-diagonal pairs only: on the diagonal both gradients come from the same tokens, whose noise does not cancel.
    # Each pair f, f' is in the sum twice, as <g_L^f, g^f'> and as <g_L^f', g^f>.
    cross, own, full = _prefix_products(gram, 1.0 - np.eye(folds))
    return _ratio(cross, own, full)


def _ratio(cross: F64, own: F64, full: float) -> F64:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((own > 0) & (full > 0), cross / np.sqrt(own * full), np.nan)


def shortest_admissible(windows: Sequence[int], cosines: Sequence[float], rho: float) -> int:
    """The shortest window whose cosine is at least `rho`; the last window when none is."""
    for window, cosine in zip(windows, cosines, strict=True):
        if cosine >= rho:  # false for nan
            return window
    return windows[-1]
