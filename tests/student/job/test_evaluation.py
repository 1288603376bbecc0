"""What an evaluation says while it runs and when it is done."""

from student.data.report import EvalReport
from student.job.evaluation import describe, from_json, to_json
from student.job.evaluator import QUIET_SECONDS, Progress


def test_progress_is_told_from_time_to_time() -> None:
    said, now = list[str](), [100.0]
    progress = Progress(said.append, lambda: now[0])
    progress.begin()
    for at, line in (
        (0.0, "short"),
        (QUIET_SECONDS, "a"),
        (1.5 * QUIET_SECONDS, "soon after"),
        (2 * QUIET_SECONDS, "b"),
    ):
        now[0] = 100.0 + at
        progress.say(line)
    assert said == ["a", "b"]
    progress.begin()
    progress.say("another one")
    assert said == ["a", "b"]


def test_an_accuracy_comes_with_the_number_of_prompts_behind_it() -> None:
    report = EvalReport(0.5, (), 3.0, 0.0, None, 9, judged=49, accuracy_half_width=0.138)
    assert describe(report) == "accuracy 0.500 ± 0.138 of 49 judged"
    assert from_json(to_json(report)).judged == 49
    assert describe(EvalReport(float("nan"), (), 3.0, 0.0, None, 9)) == "accuracy unknown"
