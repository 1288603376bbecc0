"""Real server processes that die, freeze, lie and return, under the real client: nothing lost, nothing changed.

Each case scores steps of rows as a trainer does and compares every byte with what a calm fleet answers. Goals that
are times (a frozen replica is given up within 10 s, fail-over within 1 s, a revived one used within 3 s) are printed
by `make chaos` and asserted with room for a busy machine.
"""

import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fleet_cases import rows_sent

from opd.fleet.membership.outage import Outage, OutageHooks

Pool = Callable[..., list[Any]]


def report(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with capsys.disabled():
        print(f"\n    {text}")


@pytest.mark.chaos
def test_rolling_sigterm_loses_nothing(pool: Pool, chaos: SimpleNamespace) -> None:
    replicas = pool(3)
    with chaos.connect(replicas) as fleet:

        def roll(step: int) -> None:
            if step % 2 == 0 and step < 6:
                victim = replicas[step // 2]
                victim.signal(signal.SIGTERM)
                assert victim.process.wait(120) == 0
                victim.start(wait=False)

        assert chaos.work.run(fleet, range(10), roll) == 320
        assert fleet.status().counters.rows_failed == 0


def test_rolling_sigkill_loses_nothing_and_the_revived_are_used_again(
    pool: Pool, chaos: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = pool(2)
    pauses, revivals = [], []
    with chaos.connect(replicas) as fleet:
        chaos.work.run(fleet, range(2))
        for round_, victim in enumerate(replicas):
            start = time.monotonic()
            chaos.work.run(fleet, range(10 + round_, 11 + round_), lambda step, victim=victim: victim.kill())
            pauses.append(time.monotonic() - start)
            chaos.wait_until(lambda victim=victim: chaos.state(fleet, victim) == "dead")
            victim.start()
            revivals.append(chaos.wait_until(lambda victim=victim: chaos.state(fleet, victim) == "healthy"))
        chaos.work.run(fleet, range(20, 22))
    report(capsys, f"steps with a SIGKILL took {max(pauses):.2f} s at most, revived in use after {max(revivals):.2f} s")


@pytest.mark.chaos
def test_a_frozen_replica_is_given_up_and_used_again_after_it_thaws(
    pool: Pool, chaos: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = pool(2)
    with chaos.connect(replicas) as fleet:
        chaos.work.run(fleet, range(2))
        replicas[0].signal(signal.SIGSTOP)
        start = time.monotonic()
        chaos.work.run(fleet, range(2, 4))
        chaos.wait_until(lambda: chaos.state(fleet, replicas[0]) == "dead")
        dead = time.monotonic() - start
        replicas[0].signal(signal.SIGCONT)
        back = chaos.wait_until(lambda: chaos.state(fleet, replicas[0]) == "healthy")
        chaos.work.run(fleet, range(4, 6))
    report(capsys, f"frozen replica given up after {dead:.1f} s, used again {back:.2f} s after it thawed")


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(one, marks=pytest.mark.chaos) for one in ("unavailable=0.05", "corrupt=0.01", "lie=0.02")),
        "unavailable=0.05,corrupt=0.02,cut=0.05",
    ],
)
def test_injected_faults_change_nothing(pool: Pool, chaos: SimpleNamespace, fault: str) -> None:
    replicas = pool(1, "--fault", f"{fault},seed=1") + pool(1, "--fault", f"{fault},seed=2")
    with chaos.connect(replicas, calls={"rows": 2, "backoff_seconds": 0.01}) as fleet:
        chaos.work.run(fleet, range(15))
        assert fleet.status().counters.calls_failed > 0


def test_a_replica_that_misleads_changes_nothing_where_all_rows_are_scored_twice(
    pool: Pool, chaos: SimpleNamespace
) -> None:
    replicas = [*pool(2), *pool(1, "--fault", "mislead=1")]
    with chaos.connect(replicas, health={"cross_score_share": 1.0, "cross_score_seconds": 600.0}) as fleet:
        chaos.work.run(fleet, range(4))
        assert chaos.state(fleet, replicas[2]) == "rejected"
        assert fleet.status().counters.disagreements == 1


@pytest.mark.chaos
def test_a_replica_that_misleads_is_found_by_a_small_share_and_harms_nothing_from_then_on(
    pool: Pool, chaos: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = [*pool(2), *pool(1, "--fault", "mislead=1")]
    wrong = steps = 0
    with chaos.connect(replicas, health={"cross_score_share": 0.02, "check_seed": 1}) as fleet:
        while chaos.state(fleet, replicas[2]) != "rejected":
            assert steps < 100, "3,200 rows, 64 of them scored twice, and nothing was noticed"
            found = fleet.score("t", chaos.work.rows(steps), chaos.spec)
            right = chaos.work.calm(steps)
            wrong += sum(chaos.numbers(scores) != truth for scores, truth in zip(found, right, strict=True))
            steps += 1
        before = fleet.status().counters
        chaos.work.run(fleet, range(100, 110))
        assert chaos.state(fleet, replicas[2]) == "rejected" and before.checked_rows > 0
    report(capsys, f"misleading replica rejected after {32 * steps} rows, {wrong} of them wrong")


@pytest.mark.chaos
def test_a_hanging_call_is_survived(pool: Pool, chaos: SimpleNamespace) -> None:
    replicas = pool(1, "--fault", "hang=0.2,seed=3") + pool(1)
    with chaos.connect(replicas, calls={"attempt_seconds": 2.0, "rows": 2}) as fleet:
        chaos.work.run(fleet, range(8))


@pytest.mark.chaos
def test_one_replica_with_ten_times_the_latency_slows_nothing_down_for_long(
    pool: Pool, chaos: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = pool(2) + pool(1, "--fault", "latency=0.5s")
    with chaos.connect(replicas) as fleet:
        start = time.monotonic()
        chaos.work.run(fleet, range(6))
        counters = fleet.status().counters
        assert counters.hedges <= max(1, 0.05 * rows_sent(counters))
    report(capsys, f"6 steps beside a slow replica took {time.monotonic() - start:.2f} s, {counters.hedges} hedges")


@pytest.mark.chaos
def test_a_replica_restarted_with_other_weights_stays_out(pool: Pool, chaos: SimpleNamespace) -> None:
    replicas = pool(2)
    other = ("--engine", "numpy_teacher:NumpyEngine", "--engine-option", "seed=7", "--model", "t=numpy")
    with chaos.connect(replicas) as fleet:
        chaos.work.run(fleet, range(2))
        replicas[0].kill()
        chaos.work.run(fleet, range(2, 3))
        replicas[0].start(*other)
        chaos.wait_until(
            lambda: any("weights_hash" in r.reason for r in fleet.status().replicas if r.state == "rejected")
        )
        chaos.work.run(fleet, range(3, 5))
        assert chaos.state(fleet, replicas[0]) == "rejected"


def test_the_whole_pool_goes_down_and_comes_back(pool: Pool, chaos: SimpleNamespace) -> None:
    replicas = pool(2)
    heard: list[str] = []
    outage = {"emergency_after_seconds": 1.0, "notice_seconds": 0.5}
    with chaos.connect(replicas, outage=outage) as fleet:
        chaos.work.run(fleet, range(2))
        for replica in replicas:
            replica.kill()

        def emergency(outage: Outage) -> None:
            heard.append(outage.sentence())
            for replica in replicas:
                replica.start(wait=False)

        rows = chaos.work.rows(2)
        from_calm = chaos.work.calm(2)
        spec = chaos.spec
        scores = fleet.score("t", rows, spec, hooks=OutageHooks(emergency=emergency))
        assert [chaos.numbers(s) for s in scores] == from_calm
        chaos.work.run(fleet, range(3, 5))
    assert len(heard) == 1 and "waiting for teacher 't'" in heard[0]


@pytest.mark.chaos
def test_a_partition_is_survived_and_healed(pool: Pool, chaos: SimpleNamespace, cable: SimpleNamespace) -> None:
    (near,) = pool(1)
    (far,) = pool(1, "--host", cable.host, "--allow-insecure", prefix=cable.prefix, host=cable.host)
    with chaos.connect([near, far]) as fleet:
        chaos.work.run(fleet, range(3))
        cable.pull(True)
        start = time.monotonic()
        chaos.work.run(fleet, range(3, 6))
        chaos.wait_until(lambda: chaos.state(fleet, far) == "dead")
        dead = time.monotonic() - start
        cable.pull(False)
        chaos.wait_until(lambda: chaos.state(fleet, far) == "healthy")
        chaos.work.run(fleet, range(6, 8))
    print(f"partition noticed after {dead:.1f} s")
