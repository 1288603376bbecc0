"""pass@k, intervals and repetition, against enumeration."""

from itertools import combinations

import numpy as np
import pytest

from student.data.figures import half_width, ks_up_to, pass_at_k, quoted, repetition


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_of_k_answers_with_a_correct_one(samples: int) -> None:
    for correct in range(samples + 1):
        answers = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            draws = [max(draw) for draw in combinations(answers, k)]
            assert pass_at_k(correct, samples, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not() -> None:
    """Over all outcomes of four answers that are correct with probability p, its mean is 1 - (1 - p)^2."""
    p, n, k = 0.3, 4, 2
    chance = {c: len(list(combinations(range(n), c))) * p**c * (1 - p) ** (n - c) for c in range(n + 1)}
    mean = sum(weight * pass_at_k(c, n, k) for c, weight in chance.items())
    plain = sum(weight * (1 - (1 - c / n) ** k) for c, weight in chance.items())
    truth = 1 - (1 - p) ** k
    assert mean == pytest.approx(truth, abs=1e-12) and abs(plain - truth) > 0.01


@pytest.mark.parametrize("k", [0, 5])
def test_a_k_beyond_the_answers_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=r"1\.\.4"):
        pass_at_k(1, 4, k)


def test_the_k_shown_are_powers_of_two_and_the_number_of_answers() -> None:
    assert [ks_up_to(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_an_interval_needs_two_prompts_and_covers_the_mean() -> None:
    assert half_width([1.0]) is None and half_width([0.5, 0.5]) == 0.0
    rng = np.random.default_rng(0)
    covered = [abs(np.mean(draw) - 0.3) <= (half_width(list(draw)) or 0) for draw in rng.random((2000, 100)) < 0.3]
    assert 0.92 < np.mean(covered) < 0.97


def test_answers_that_are_all_wrong_or_all_right_are_not_certain() -> None:
    assert half_width([0.0] * 32) == half_width([1.0] * 32) == pytest.approx(1.96**2 / (32 + 1.96**2), rel=1e-4)
    rng = np.random.default_rng(0)
    # Half of these draws are 32 times wrong.
    covered = [abs(np.mean(draw) - 0.02) <= (half_width(list(draw)) or 0) for draw in rng.random((2000, 32)) < 0.02]
    assert np.mean(covered) > 0.95


def test_repetition_tells_a_loop_from_a_text() -> None:
    text = np.random.default_rng(0).integers(0, 1000, 200).astype(np.uint32)
    assert repetition(text) == 0.0
    assert repetition(np.tile(text[:5], 40)) == pytest.approx(1 - 5 / 197)
    assert repetition(text[:3]) == 0.0


def test_a_quote_is_what_the_hint_says_and_the_prompt_does_not() -> None:
    def ids(text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)

    assert quoted(ids("abcdef"), ids("xxabcdyy"), ids("q")) == pytest.approx(1 / 3)
    assert quoted(ids("abcdef"), ids("xxabcdyy"), ids("abcd")) == 0.0
    assert quoted(ids("abc"), ids("abcd"), ids("q")) == 0.0 == quoted(ids("abcd"), ids(""), ids(""))
    assert quoted(ids("abcdabcd"), ids("abcdabcd"), ids("q")) == 1.0
