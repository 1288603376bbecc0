import pytest

from opd.fleet.scheduling.throughput import Throughput


def test_idle_time_is_not_counted_and_a_stall_is() -> None:
    throughput = Throughput()
    assert throughput.speed(0.0) is None
    throughput.busy(0.0)
    throughput.answered(100, 1.0)
    throughput.idle()
    assert throughput.speed(50.0) == 100.0
    throughput.busy(60.0)
    assert throughput.speed(61.0) == 50.0, "while nothing is answered"
    throughput.answered(100, 61.0)
    assert throughput.speed(61.0) == pytest.approx(100.0)


def test_a_server_that_changed_is_known_by_its_last_twenty_busy_seconds() -> None:
    throughput = Throughput()
    throughput.busy(0.0)
    for second in range(1, 101):
        throughput.answered(100, float(second))
    for second in range(101, 161):
        throughput.answered(10, float(second))
    assert 10.0 < throughput.speed(160.0) < 16.0
