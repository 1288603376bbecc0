from opd.fleet.membership.outage import Outage, OutageHooks, OutageWatch
from opd.fleet.settings import OutageSettings

SETTINGS = OutageSettings(budget_seconds=1800, emergency_after_seconds=60, notice_seconds=10)


def outage(seconds: float, teacher: str = "math") -> Outage:
    return Outage(teacher, seconds, 5, "both replicas are dead", 1800)


def watch() -> tuple[OutageWatch, list[tuple[str, float]]]:
    heard: list[tuple[str, float]] = []
    hooks = OutageHooks(
        waiting=lambda o: heard.append(("waiting", o.seconds)),
        emergency=lambda o: heard.append(("emergency", o.seconds)),
        recovered=lambda o: heard.append(("recovered", o.seconds)),
    )
    return OutageWatch(SETTINGS, hooks), heard


def test_a_blink_is_not_worth_a_word() -> None:
    seen, heard = watch()
    seen.see([outage(0.4)])
    seen.see([])
    assert heard == []


def test_notices_come_at_their_interval_and_the_emergency_once() -> None:
    seen, heard = watch()
    for second in range(1, 101):
        seen.see([outage(float(second))])
    assert [at for what, at in heard if what == "waiting"] == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91]
    assert [at for what, at in heard if what == "emergency"] == [60]


def test_a_second_outage_is_a_new_emergency() -> None:
    seen, heard = watch()
    seen.see([outage(61.0)])
    seen.see([])
    seen.see([outage(61.0)])
    assert [what for what, _ in heard] == ["waiting", "emergency", "recovered", "waiting", "emergency"]


def test_teachers_are_told_apart() -> None:
    seen, heard = watch()
    seen.see([outage(61.0, "math"), outage(5.0, "code")])
    seen.see([outage(6.0, "code")])
    assert [what for what, _ in heard] == ["waiting", "emergency", "waiting", "recovered"]


def test_the_sentence_names_teacher_time_and_reason() -> None:
    assert outage(75.0).sentence() == (
        "waiting for teacher 'math' for 75 s with 5 rows (at most 1800 s): both replicas are dead"
    )
