import random

from hypothesis import given
from hypothesis import strategies as st

from opd.fleet.scheduling.budget import HedgeBudget, RetryBudget, backoff_seconds, pushback_seconds


def test_reissues_beyond_the_budget_wait_instead_of_being_given_up() -> None:
    budget = RetryBudget(ratio=0.1, rate=10.0, burst=5.0)
    waits = [budget.wait_seconds(0.0) for _ in range(8)]
    assert waits[:5] == [0.0] * 5
    assert [round(wait, 3) for wait in waits[5:]] == [0.1, 0.2, 0.3]


def test_ten_first_attempts_pay_for_one_reissue() -> None:
    budget = RetryBudget(ratio=0.1, rate=1e-9, burst=1.0)
    assert budget.wait_seconds(0.0) == 0.0
    assert budget.wait_seconds(0.0) > 1e6
    budget.first_attempt(20)
    assert budget.wait_seconds(0.0) == 0.0


def test_first_reissues_that_do_not_wait_for_the_budget_leave_the_later_ones_little_to_wait_for() -> None:
    budget = RetryBudget(ratio=0.1, rate=10.0, burst=5.0)
    waits = [budget.wait_seconds(0.0, 0.2) for _ in range(5000)]
    assert waits[:5] == [0.0] * 5 and max(waits) == 0.2
    assert [round(budget.wait_seconds(0.0), 3) for _ in range(2)] == [0.3, 0.4]
    assert budget.wait_seconds(0.0, 0.2) == 0.2
    assert round(budget.wait_seconds(0.0), 3) == 0.5, "what the later ones owe is not forgiven"


def test_time_refills_the_budget() -> None:
    budget = RetryBudget(ratio=0.0, rate=2.0, burst=1.0)
    budget.wait_seconds(0.0)
    assert budget.wait_seconds(0.5) == 0.0


@given(st.lists(st.integers(0, 30), max_size=60))
def test_hedges_never_exceed_their_share_except_the_very_first(sent: list[int]) -> None:
    budget = HedgeBudget(0.05)
    for rows in sent:
        budget.sent(rows)
        while budget.take():
            pass
        assert budget.hedged <= max(1, 0.05 * budget.rows)


def test_a_cap_of_zero_hedges_nothing() -> None:
    budget = HedgeBudget(0.0)
    budget.sent(1000)
    assert not budget.take()


def test_backoff_doubles_with_jitter_and_is_bounded() -> None:
    rng = random.Random(0)
    for failures in range(1, 20):
        for _ in range(20):
            pause = backoff_seconds(0.05, failures, rng)
            full = min(5.0, 0.05 * 2 ** (failures - 1))
            assert full / 2 <= pause <= full


@given(st.floats(0.01, 30.0), st.integers(1, 1000), st.integers())
def test_a_pause_is_at_least_what_the_server_asks_for_and_grows_within_bounds(
    asked: float, refusals: int, seed: int
) -> None:
    first, later = (pushback_seconds(asked, count, random.Random(seed)) for count in (refusals, refusals + 1))
    assert asked <= first <= later <= 1.25 * 4 * asked
    assert pushback_seconds(asked, 9, random.Random(seed)) >= 4 * asked
    assert len({pushback_seconds(asked, refusals, random.Random(number)) for number in range(5)}) > 1
