"""Admission: budgets are never exceeded, released exactly once, and refusals say when to come back."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.errors import InvalidRequestError, OverloadedError
from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.batching.admission import Budget, Client, Price, check_deadline
from teacher_server.batching.queue import FairQueue, SequenceJob
from teacher_server.engines.base import EngineItem

ITEM = EngineItem(ScoreItem(np.zeros(2, np.uint32), 1), PayloadSpec.sampled())


def test_over_budget_is_refused_with_usage_and_a_time() -> None:
    budget = Budget(100, 1000)
    held = budget.reserve(Client("a", ""), Price(80, 10), tokens_per_second=10.0)
    with pytest.raises(OverloadedError) as caught:
        budget.reserve(Client("b", ""), Price(50, 10), tokens_per_second=10.0)
    assert caught.value.retry_after == pytest.approx(5.0)
    assert caught.value.usage["used_tokens"] == 80
    assert caught.value.usage["budget_tokens"] == 100
    held.close()
    budget.reserve(Client("b", ""), Price(50, 10), tokens_per_second=10.0).close()
    assert budget.used == Price(0, 0)


@pytest.mark.parametrize(
    ("used", "tokens", "seconds"),
    [(45, 15, 1.5), (20, 40, 2.0), (90, 10, 3.0)],
    ids=["as long as it takes itself", "until all is done", "until enough is done"],
)
def test_a_refused_caller_is_not_called_back_when_just_enough_may_be_free(
    used: int, tokens: int, seconds: float
) -> None:
    budget = Budget(100, 1000, client_share=0.5**0.5)  # 70 for the caller, 50 for one of its names
    budget.reserve(Client("a", ""), Price(used, 1), tokens_per_second=10.0)
    with pytest.raises(OverloadedError) as caught:
        budget.reserve(Client("a", ""), Price(tokens, 1), tokens_per_second=10.0)
    assert caught.value.retry_after == pytest.approx(seconds, abs=0.2)


@pytest.mark.parametrize(
    ("others", "seconds"),
    [({}, 10.0), ({"q": 400}, 20.0), ({"q": 40}, 14.0), ({"q": 200, "r": 200}, 30.0)],
    ids=["alone", "beside a long queue", "beside a short one", "beside two"],
)
def test_a_caller_over_its_share_is_called_back_when_the_fair_queue_has_served_it(
    others: dict[str, int], seconds: float
) -> None:
    budget, queue = Budget(1000, 1000, client_share=0.5), FairQueue(lambda: 0.0)
    held = {"p": 450, **others}
    for principal, tokens in held.items():
        client = Client(principal, "")
        for _ in range(tokens // 10):
            queue.add(SequenceJob(ITEM, 10, math.inf, client, lambda *_: None))
        # The first call of a caller may exceed its share; one name of it has a quarter of the budget.
        budget.reserve(client, Price(tokens, 1), tokens_per_second=10.0)
    with pytest.raises(OverloadedError, match="for this client") as caught:
        budget.reserve(Client("p", "another"), Price(100, 1), tokens_per_second=10.0)
    assert caught.value.retry_after == pytest.approx(seconds)
    taken = [job for _ in range(sum(held.values()) // 10) for job in queue.take(10, 1)[0]]
    tenth = [number for number, job in enumerate(taken) if job.client.principal == "p"][9]
    assert (tenth + 1) * 10 / 10.0 == pytest.approx(seconds, abs=len(others))


def test_a_name_over_its_share_waits_for_other_names_and_other_callers() -> None:
    budget = Budget(1000, 1000, client_share=0.75)  # 562 for one name
    for client, tokens in ((Client("p", "first"), 500), (Client("p", "second"), 60), (Client("q", ""), 300)):
        budget.reserve(client, Price(tokens, 1), tokens_per_second=100.0)
    with pytest.raises(OverloadedError, match="for this client") as caught:
        budget.reserve(Client("p", "first"), Price(100, 1), tokens_per_second=100.0)
    assert caught.value.retry_after == pytest.approx((100 + 60 + 160) / 100)


def test_reply_bytes_are_a_budget_of_their_own() -> None:
    budget = Budget(100, 1000)
    budget.reserve(Client("a", ""), Price(1, 900), tokens_per_second=0)
    with pytest.raises(OverloadedError):
        budget.reserve(Client("b", ""), Price(1, 200), tokens_per_second=0)


def test_what_would_not_fit_into_an_idle_server_is_no_overload() -> None:
    with pytest.raises(InvalidRequestError, match="fewer sequences"):
        Budget(100, 1000).reserve(Client("a", ""), Price(101, 1), tokens_per_second=0)


def test_one_client_leaves_room_for_the_others() -> None:
    budget = Budget(100, 1000, client_share=0.75)
    budget.reserve(Client("greedy", ""), Price(70, 1), tokens_per_second=0)
    with pytest.raises(OverloadedError):
        budget.reserve(Client("greedy", ""), Price(10, 1), tokens_per_second=0)
    budget.reserve(Client("modest", ""), Price(30, 1), tokens_per_second=0)


def test_names_divide_the_share_of_their_principal() -> None:
    budget = Budget(1000, 1000, client_share=0.5)

    def reserve(principal: str, name: str, tokens: int) -> None:
        budget.reserve(Client(principal, name), Price(tokens, 1), tokens_per_second=0)

    reserve("p", "first", 200)
    with pytest.raises(OverloadedError, match="for this client"):
        reserve("p", "first", 100)  # a quarter of all is for one name
    reserve("p", "second", 250)
    for number in range(20):
        with pytest.raises(OverloadedError, match="for this client"):
            reserve("p", f"new{number}", 100)  # half of all is for the principal, whatever its names
    reserve("q", "modest", 500)


def test_a_client_that_holds_nothing_may_take_all() -> None:
    Budget(100, 1000, client_share=0.5).reserve(Client("a", ""), Price(100, 1000), tokens_per_second=0)


def test_a_second_close_is_an_error_not_a_second_release() -> None:
    budget = Budget(100, 1000)
    other = budget.reserve(Client("a", ""), Price(10, 10), tokens_per_second=0)
    held = budget.reserve(Client("a", ""), Price(10, 10), tokens_per_second=0)
    held.close()
    with pytest.raises(RuntimeError, match="closed already"):
        held.close()
    assert budget.used == Price(10, 10)
    other.close()
    assert budget._held == {}


@given(
    st.lists(
        st.tuples(st.sampled_from(["pa", "pb", "qa"]), st.integers(0, 60), st.integers(0, 60), st.integers(0, 80)),
        max_size=40,
    )
)
@settings(max_examples=200, deadline=None)
def test_the_budget_is_never_exceeded_and_always_returns_to_zero(script: list[tuple[str, int, int, int]]) -> None:
    budget = Budget(100, 100, client_share=0.8)
    held = []
    for client, tokens, size, part in script:
        try:
            held.append(budget.reserve(Client(*client), Price(tokens, size), tokens_per_second=5.0))
        except OverloadedError as error:
            assert 0 < error.retry_after <= 30
        assert 0 <= budget.used.tokens <= 100
        assert 0 <= budget.used.reply_bytes <= 100
        if held and part % 3 == 0:
            held[part % len(held)].release(Price(part, part))
        if held and part % 5 == 0:
            held.pop(part % len(held)).close()
    for one in held:
        one.close()
    assert budget.used == Price(0, 0)
    assert budget.opened == budget.closed


def test_a_request_that_would_be_late_is_refused_before_it_waits() -> None:
    with pytest.raises(OverloadedError, match="deadline"):
        check_deadline(deadline=101.0, now=100.0, queued_tokens=1000, tokens=10, tokens_per_second=100.0)
    check_deadline(deadline=120.0, now=100.0, queued_tokens=1000, tokens=10, tokens_per_second=100.0)
    check_deadline(deadline=101.0, now=100.0, queued_tokens=1000, tokens=10, tokens_per_second=0.0)
    check_deadline(deadline=math.inf, now=100.0, queued_tokens=10**9, tokens=10, tokens_per_second=1.0)
