"""Which windows are admissible: cosines between prefix gradients and the full gradient, from one Gram matrix.

Let G[f, s, f', s'] be the inner products of the gradients of fold f and segment s, and g_L the sum of the segments up
to window L. The published criterion (arXiv 2605.28396) is

    published(L) = <g_L, g> / (|g_L| |g|)                          all folds together

It is inflated: g_L and g share their tokens, so that even if every token's gradient were independent noise it would be
sqrt(tokens in L / tokens). Inner products of different folds share no tokens and estimate those of the expected
gradients without bias, so

    cross_fitted(L) = <g_L, g>' / sqrt(<g_L, g_L>' <g, g>')        ' = over pairs of different folds

estimates the cosine of the expected gradients (not itself unbiased: it is a ratio). Where an estimated squared norm is
not positive, noise hides the signal; the cosine is then NaN and the window not admissible. Cross-fitting is our
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
    """The published cosine [S] of each window's gradient with the full one; 1 for the last, NaN for a zero gradient."""
    folds = gram.shape[0]
    cross, own, full = _prefix_products(gram, np.ones((folds, folds)))
    return _ratio(cross, own, full)


def cross_fitted(gram: Float64[np.ndarray, "f s f s"]) -> Float64[np.ndarray, " s"]:
    """The cross-fitted cosine [S] of each window with the full gradient; may exceed 1 by noise, NaN without signal.

    Raises:
        ValueError: for fewer than two folds.
    """
    folds = gram.shape[0]
    if folds < 2:
        raise ValueError(f"gram has {folds} folds; cross-fitting needs at least 2")
    # Only pairs of different folds: within a fold both gradients come from the same tokens, whose noise does not
    # average out. Each pair f, f' is in the sum twice, as <g_L^f, g^f'> and as <g_L^f', g^f>.
    cross, own, full = _prefix_products(gram, 1.0 - np.eye(folds))
    return _ratio(cross, own, full)


def _ratio(cross: F64, own: F64, full: float) -> F64:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where((own > 0) & (full > 0), cross / np.sqrt(own * full), np.nan)


def shortest_admissible(windows: Sequence[int], cosines: Sequence[float], rho: float) -> int:
    """The shortest window whose cosine is at least `rho`; the last window if there is none."""
    for window, cosine in zip(windows, cosines, strict=True):
        if cosine >= rho:  # false for nan
            return window
    return windows[-1]
