"""The criteria of ADWIN against gradients whose directions are known."""

import numpy as np
import pytest

from student.methods.windows.admissibility import cross_fitted, published, shortest_admissible


def gram_of(vectors: np.ndarray) -> np.ndarray:
    """[F, S, P] gradients to [F, S, F, S] inner products."""
    folds, segments, _ = vectors.shape
    flat = vectors.reshape(folds * segments, -1)
    return (flat @ flat.T).reshape(folds, segments, folds, segments)


def test_published_is_the_cosine_of_prefix_and_whole() -> None:
    vectors = np.random.default_rng(0).normal(size=(3, 4, 7))
    whole = vectors.sum((0, 1))
    for window, found in enumerate(published(gram_of(vectors)), start=1):
        prefix = vectors[:, :window].sum((0, 1))
        assert found == pytest.approx(prefix @ whole / np.linalg.norm(prefix) / np.linalg.norm(whole))


def test_cross_fitted_equals_published_without_noise() -> None:
    segments = np.random.default_rng(1).normal(size=(4, 9))
    gram = gram_of(np.stack([segments] * 3))
    np.testing.assert_allclose(cross_fitted(gram), published(gram), rtol=1e-12)


def test_published_is_inflated_by_shared_tokens_and_cross_fitted_is_not() -> None:
    """Segments with orthogonal expected gradients and much noise: the true cosine of the first of four is 1/2."""
    rng, size = np.random.default_rng(2), 4000
    mean = np.zeros((4, size))
    mean[np.arange(4), np.arange(4)] = 40.0
    estimates = []
    plain = []
    for _ in range(40):
        gram = gram_of(mean + rng.normal(size=(4, 4, size)))
        plain.append(published(gram)[0])
        estimates.append(cross_fitted(gram)[0])
    assert np.mean(estimates) == pytest.approx(0.5, abs=0.03)
    # Pure noise alone: sqrt(1/4) as well, and that is the point: it says nothing. Unequal signal shows the inflation.
    tail = np.zeros((4, size))
    tail[3, 0] = 60.0
    inflated = published(gram_of(tail + rng.normal(size=(4, 4, size))))
    honest = np.mean([np.nan_to_num(cross_fitted(gram_of(tail + rng.normal(size=(4, 4, size))))[2]) for _ in range(40)])
    assert inflated[2] > 0.3
    assert abs(honest) < 0.25


def test_without_signal_nothing_but_the_whole_is_admissible() -> None:
    gram = -np.ones((2, 3, 2, 3)) + 10 * np.eye(6).reshape(2, 3, 2, 3)
    cosines = cross_fitted(gram)
    assert np.isnan(cosines).all()
    assert shortest_admissible([2, 4, 8], cosines.tolist(), 0.7) == 8


def test_the_shortest_window_over_rho_is_taken() -> None:
    assert shortest_admissible([2, 4, 8], [0.5, 0.71, 1.0], 0.7071) == 4
    assert shortest_admissible([2, 4, 8], [0.9, 0.6, 1.0], 0.7071) == 2
    assert shortest_admissible([2, 4, 8], [0.1, 0.2, 0.3], 0.7071) == 8


def test_cross_fitting_needs_two_folds() -> None:
    with pytest.raises(ValueError, match="1 folds"):
        cross_fitted(np.ones((1, 2, 1, 2)))
