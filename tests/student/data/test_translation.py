"""A teacher's top-k on the student's tokens: byte-prefix marginalisation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.wire.types import Scores
from student.data.translation import marginal
from student.scoring.spans import longest_prefixes

STUDENT = [b"a", b"ab", b"b", b"c"]
TEACHER = [b"ab", b"abc", b"b", b"zz"]


def topk(ids: list[list[int]], probabilities: list[list[float]]) -> Scores:
    mass = np.array(probabilities)
    with np.errstate(divide="ignore"):
        tail = np.log(np.maximum(0, 1 - mass.sum(1)))
    return Scores(
        sampled=np.zeros(len(ids), np.float32),
        ids=np.array(ids, np.uint32),
        values=np.log(mass).astype(np.float32),
        log_tail=tail.astype(np.float32),
    )


def spread(scores: Scores, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """[T, V] probabilities at the student's ids, and [T] what is left."""
    assert scores.ids is not None and scores.values is not None and scores.log_tail is not None
    out = np.zeros((len(scores.ids), vocabulary))
    np.put_along_axis(out, scores.ids.astype(np.int64), np.exp(scores.values.astype(np.float64)), 1)
    return out, np.exp(scores.log_tail.astype(np.float64))


def test_mass_goes_to_the_longest_prefix_and_the_rest_to_one_bucket() -> None:
    onto = longest_prefixes(STUDENT, TEACHER)
    assert onto.tolist() == [1, 1, 2, -1]
    found = marginal(topk([[0, 1, 2, 3]], [[0.4, 0.3, 0.2, 0.1]]), onto, np.array([0]))
    mass, rest = spread(found, 4)
    np.testing.assert_allclose(mass, [[0, 0.7, 0.2, 0]], atol=1e-6)
    np.testing.assert_allclose(rest, [0.1], atol=1e-6)


def test_positions_without_a_common_boundary_say_nothing() -> None:
    found = marginal(topk([[0, 1]], [[0.5, 0.25]]), longest_prefixes(STUDENT, TEACHER), np.array([-1, 0]))
    mass, rest = spread(found, 4)
    np.testing.assert_allclose(mass, [[0, 0, 0, 0], [0, 0.75, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(rest, [1, 0.25], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_mass_is_kept_and_ids_are_distinct(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocabulary, others, k = int(rng.integers(6, 12)), int(rng.integers(6, 12)), int(rng.integers(1, 6))
    onto = rng.integers(-1, vocabulary, others)
    ids = np.stack([rng.permutation(others)[:k] for _ in range(5)])
    mass = rng.dirichlet(np.ones(others), 5)
    taken = np.take_along_axis(mass, ids, 1)
    at = rng.integers(0, 5, 7)
    found = marginal(topk(ids.tolist(), taken.tolist()), onto, at)
    assert found.ids is not None and all(len(set(row)) == k for row in found.ids.tolist())
    assert found.ids.max() < vocabulary
    want = np.zeros((5, vocabulary + 1))
    for row in range(5):
        for token, share in zip(ids[row], taken[row], strict=True):
            want[row, onto[token]] += share
        want[row, -1] += 1 - taken[row].sum()
    got, rest = spread(found, vocabulary)
    np.testing.assert_allclose(np.column_stack([got, rest]), want[at], atol=1e-5)


def test_one_vocabulary_keeps_every_number() -> None:
    onto = np.arange(4)
    answer = topk([[2, 0, 3]], [[0.5, 0.25, 0.125]])
    found = marginal(answer, onto, np.array([0]))
    assert found.ids is not None and found.values is not None and answer.ids is not None and answer.values is not None
    assert found.ids.tolist() == answer.ids.tolist()
    np.testing.assert_allclose(found.values, answer.values, rtol=1e-6)
