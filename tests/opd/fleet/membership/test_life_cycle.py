import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.fleet.membership.life_cycle import ReplicaLife, ReplicaState
from opd.fleet.settings import HealthSettings

S = ReplicaState
SETTINGS = HealthSettings(ping_failures=3, request_failures=3, cool_off_seconds=1.0)


def fresh() -> ReplicaLife:
    return ReplicaLife(SETTINGS)


def healthy() -> ReplicaLife:
    life = fresh()
    life.admitted(0.0)
    return life


def dead() -> ReplicaLife:
    life = healthy()
    for _ in range(3):
        life.ping_failed(1.0, "no answer")
    assert life.state is S.DEAD
    return life


def test_a_new_replica_is_unverified_until_it_is_admitted() -> None:
    life = fresh()
    assert life.state is S.UNVERIFIED and not life.usable
    life.ping_answered(1.0)
    life.request_answered(1.0)
    assert life.state is S.UNVERIFIED
    life.admitted(2.0)
    assert life.state is S.HEALTHY and life.usable


def test_one_failed_ping_makes_a_suspect_and_one_answer_clears_it() -> None:
    life = healthy()
    life.ping_failed(1.0, "no answer")
    assert life.state is S.SUSPECT and not life.usable
    life.ping_answered(2.0)
    assert life.state is S.HEALTHY


def test_three_failed_pings_in_a_row_are_a_death() -> None:
    life = healthy()
    life.ping_failed(1.0, "a")
    life.ping_failed(2.0, "b")
    assert life.state is S.SUSPECT
    change = life.ping_failed(3.0, "frozen")
    assert change is not None and change.after is S.DEAD and "frozen" in life.reason


def test_an_answered_ping_breaks_the_row_of_failed_pings() -> None:
    life = healthy()
    for now in range(10):
        life.ping_failed(now, "a")
        life.ping_failed(now, "b")
        life.ping_answered(now)
    assert life.state is S.HEALTHY


def test_a_wedged_server_that_answers_pings_is_dead_all_the_same() -> None:
    life = healthy()
    for now in range(3):
        life.ping_answered(now)
        life.request_failed(now, "no answer in time")
        life.ping_answered(now)
    assert life.state is S.DEAD


def test_an_answered_request_breaks_the_row_of_failed_requests() -> None:
    life = healthy()
    for now in range(10):
        life.request_failed(now, "x")
        life.request_failed(now, "x")
        life.request_answered(now)
    assert life.state is S.HEALTHY


def test_an_answered_request_does_not_clear_a_suspect_whose_pings_fail() -> None:
    life = healthy()
    life.ping_failed(1.0, "no answer")
    life.request_answered(1.1)
    assert life.state is S.SUSPECT


def test_a_dead_replica_never_becomes_healthy_without_a_check() -> None:
    life = dead()
    life.request_answered(2.0)
    life.admitted(2.0)
    assert life.state is S.DEAD
    life.ping_answered(2.0)
    assert life.state is S.UNVERIFIED
    life.admitted(3.0)
    assert life.state is S.HEALTHY


def test_a_replica_that_died_of_its_pings_may_return_at_once() -> None:
    life = dead()
    life.ping_answered(1.0)
    assert life.state is S.UNVERIFIED


def test_a_replica_that_died_of_its_requests_must_cool_off() -> None:
    life = healthy()
    for _ in range(3):
        life.request_failed(10.0, "x")
    life.ping_answered(10.5)
    assert life.state is S.DEAD
    life.ping_answered(11.0)
    assert life.state is S.UNVERIFIED


def test_the_cool_off_doubles_for_a_replica_that_keeps_failing_and_is_bounded() -> None:
    life = healthy()
    pauses = []
    now = 0.0
    for _ in range(10):
        for _ in range(3):
            life.request_failed(now, "x")
        pauses.append(life.not_before - now)
        now = life.not_before
        life.ping_answered(now)
        life.admitted(now)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == 60.0


def test_twenty_calm_calls_forgive_the_cool_off() -> None:
    life = healthy()
    for _ in range(2):
        life.sent_corrupt_data(0.0, "crc")
        life.ping_answered(100.0)
        life.admitted(100.0)
    for _ in range(20):
        life.request_answered(101.0)
    life.sent_corrupt_data(200.0, "crc")
    assert life.not_before == 201.0


def test_a_replica_that_sent_corrupt_data_is_dead_at_once() -> None:
    life = healthy()
    life.sent_corrupt_data(1.0, "probabilities sum to 1.7")
    assert life.state is S.DEAD and "1.7" in life.reason


def test_a_restarted_process_starts_afresh_but_unverified() -> None:
    life = healthy()
    life.sent_corrupt_data(1.0, "crc")
    life.restarted(1.1)
    assert life.state is S.UNVERIFIED and life.not_before == 1.1
    life.admitted(1.2)
    assert life.usable


def test_failures_of_before_a_check_do_not_count_after_it() -> None:
    life = healthy()
    for now in range(2):
        life.ping_failed(now, "no answer")
        life.request_failed(now, "x")
    life.identity_changed(2.0, "its weights were replaced")
    life.admitted(3.0)
    life.ping_failed(4.0, "no answer")
    life.request_failed(4.0, "x")
    assert life.state is S.SUSPECT


def test_the_deaths_of_an_old_process_lengthen_no_pause_of_the_new_one() -> None:
    life = healthy()
    for _ in range(3):
        life.sent_corrupt_data(0.0, "crc")  # the last of these pauses is 4 s
        life.restarted(0.0) if life.not_before == 4.0 else life.ping_answered(100.0)
        life.admitted(100.0)
    life.sent_corrupt_data(200.0, "crc")
    assert life.not_before == 201.0


def test_a_healthy_replica_whose_process_changed_must_be_checked_again() -> None:
    life = healthy()
    life.ping_failed(0.0, "no answer")
    life.ping_failed(0.5, "no answer")
    life.restarted(1.0)
    life.ping_failed(1.5, "no answer")  # the first of this process
    assert life.state is S.UNVERIFIED


def test_a_rejected_replica_stays_out_and_says_why() -> None:
    life = fresh()
    life.rejected(1.0, "weights differ")
    life.ping_answered(2.0)
    assert life.state is S.REJECTED and life.reason == "weights differ" and not life.usable
    life.identity_changed(3.0, "its weights were replaced")
    assert life.state is S.UNVERIFIED
    life.rejected(4.0, "weights differ")
    life.admitted(5.0)
    assert life.usable, "a later check may pass"


def test_a_check_that_could_not_be_made_leaves_the_state_as_it_is() -> None:
    life = fresh()
    assert life.postponed(1.0, "its state is loading") is None
    assert life.state is S.UNVERIFIED and life.reason == "its state is loading"
    life.admitted(2.0)
    life.postponed(3.0, "too late")
    assert life.usable and life.reason == "agrees with the pool"


def test_a_retired_replica_ignores_failures_and_returns_only_through_a_check() -> None:
    life = healthy()
    life.retired(1.0, "draining")
    for _ in range(5):
        life.ping_failed(2.0, "gone")
        life.request_failed(2.0, "gone")
    assert life.state is S.RETIRED
    life.ping_answered(2.0)
    assert life.state is S.RETIRED
    life.restarted(3.0)
    assert life.state is S.UNVERIFIED


def test_a_changed_identity_sends_a_healthy_replica_back_to_its_check() -> None:
    life = healthy()
    life.identity_changed(1.0, "weights were swapped")
    assert life.state is S.UNVERIFIED and life.reason == "weights were swapped"


EVENTS = [
    "ping_answered",
    "ping_failed",
    "request_answered",
    "request_failed",
    "sent_corrupt_data",
    "identity_changed",
    "restarted",
]
EVENTS += ["admitted", "postponed", "rejected", "retired"]


@given(st.lists(st.sampled_from(EVENTS), max_size=60))
def test_only_a_check_leads_from_outside_into_service(events: list[str]) -> None:
    life = fresh()
    for now, event in enumerate(events):
        before = life.state
        reasons = {
            "ping_failed",
            "request_failed",
            "sent_corrupt_data",
            "identity_changed",
            "postponed",
            "rejected",
            "retired",
        }
        change = getattr(life, event)(float(now), *(["why"] if event in reasons else []))
        assert (change is None) == (before is life.state)
        if life.usable and before not in (S.HEALTHY, S.SUSPECT):
            assert event == "admitted"
        if change is not None:
            assert life.history[-1] == change and life.since == now


@pytest.mark.parametrize("state", list(ReplicaState))
def test_only_a_healthy_replica_is_usable(state: ReplicaState) -> None:
    life = fresh()
    life.state = state
    assert life.usable == (state is S.HEALTHY)
