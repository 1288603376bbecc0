"""Verification beside the rollout: several at once, a hang costs its own row, and the end of a run ends it."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from opd.errors import CancelledError
from opd.tasks.function import load_verifier
from opd.tasks.maths import MathVerifier
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from student.data.row import Row
from student.scoring.verify import Verification


class Source:
    """Judges by a function; counts how many judge at once."""

    def __init__(self, judge: Callable[[Prompt, str], Verdict]) -> None:
        self.judge, self.closed = judge, False
        self.lock, self.now, self.most = threading.Lock(), 0, 0

    def verify(self, prompt: Prompt, text: str) -> Verdict:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            return self.judge(prompt, text)
        finally:
            with self.lock:
                self.now -= 1

    def extract(self, prompt: Prompt, text: str) -> str | None:
        return text or None

    def close(self) -> None:
        self.closed = True


def rows(*texts: str) -> list[Row]:
    return [SimpleNamespace(prompt=Prompt.make("q"), text=text, verdict=None) for text in texts]  # type: ignore[misc]


def test_answers_are_judged_at_the_same_time_and_each_gets_its_own_verdict() -> None:
    together = threading.Barrier(4)

    def judge(prompt: Prompt, text: str) -> Verdict:
        together.wait(timeout=120)  # passes only when four are judged at once
        return Verdict.of(text in ("a", "c"))

    verification = Verification(Source(judge), 4)  # type: ignore[arg-type]
    made = rows("a", "b", "c", "d")
    for row in made:
        verification.submit(row)
    verification.collect(made)
    assert [row.verdict.value for row in made if row.verdict] == [1.0, 0.0, 1.0, 0.0]
    assert verification.extract(rows("x", "")) == ["x", None]
    verification.close()


def test_no_more_are_judged_at_once_than_asked_for() -> None:
    source = Source(lambda prompt, text: Verdict.of(True))
    verification = Verification(source, 2)  # type: ignore[arg-type]
    verification.collect(rows(*"abcdefgh"))
    assert source.most <= 2
    verification.close()
    assert source.closed


def test_an_answer_that_hangs_holds_up_no_other() -> None:
    release, done = threading.Event(), threading.Event()

    def judge(prompt: Prompt, text: str) -> Verdict:
        if text == "hang":
            release.wait(timeout=120)
            return Verdict.unknown("no answer within 60 s")
        if text == "last":
            done.set()
        return Verdict.of(True)

    verification = Verification(Source(judge), 2)  # type: ignore[arg-type]
    made = rows("hang", "a", "b", "c", "last")
    for row in made:
        verification.submit(row)
    assert done.wait(timeout=120)  # while the first one still hangs
    release.set()
    verification.collect(made)
    assert [row.verdict.known for row in made if row.verdict] == [False, True, True, True, True]
    verification.close()


def test_a_verifier_that_raises_says_nothing_about_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    def judge(prompt: Prompt, text: str) -> Verdict:
        raise ZeroDivisionError("oops")

    verification = Verification(Source(judge), 1)  # type: ignore[arg-type]
    row, other = rows("a", "b")
    verification.collect([row])
    verification.collect([other])
    assert row.verdict is not None and not row.verdict.known and "oops" in row.verdict.reason
    assert (
        caplog.text.count("oops; further ones are counted in the metric unknown_share") == 1
    )  # said once, not for every answer
    verification.close()


def test_a_row_that_has_its_environments_verdict_keeps_it_and_is_not_judged() -> None:
    asked: list[str] = []

    def judge(prompt: Prompt, text: str) -> Verdict:
        asked.append(text)
        return Verdict.of(True)

    verification = Verification(Source(judge), 1)  # type: ignore[arg-type]
    played, answered = made = rows("played", "answered")
    played.verdict = Verdict.of(False)
    verification.submit(played)
    verification.collect(made)
    assert (played.verdict, asked) == (Verdict.of(False), ["answered"])
    assert answered.verdict is not None and answered.verdict.value == 1.0
    verification.close()


def test_an_open_question_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("math", "exact", "numeric", "contains", "choice", "regex"):
        judge = load_verifier(name, 10.0)
        verification = Verification(Source(judge.verify), 1)  # type: ignore[arg-type]
        verification.collect(made := rows("anything"))
        verification.close()
        judge.close()
        assert made[0].verdict is not None and not made[0].verdict.known
    assert not caplog.records


def test_three_reasons_of_unknown_verdicts_are_said_and_none_of_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    def judge(prompt: Prompt, text: str) -> Verdict:
        return Verdict.of(False, "a reason") if text == "known" else Verdict.unknown(f"no {text}")

    verification = Verification(Source(judge), 1)  # type: ignore[arg-type]
    verification.collect(rows("known", *"aabcdef"))
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[1].split(";")[0] for line in said] == ["no a", "no b", "no c"]
    verification.close()


def test_closing_leaves_what_has_not_begun() -> None:
    begun, holding, release = [], threading.Event(), threading.Event()

    def judge(prompt: Prompt, text: str) -> Verdict:
        begun.append(text)
        holding.set()
        release.wait(timeout=120)
        return Verdict.of(True)

    source = Source(judge)
    source.close = release.set  # type: ignore[method-assign]  # as a verifier ends the check that it is in
    verification = Verification(source, 1)  # type: ignore[arg-type]
    for row in (made := rows("a", "b")):
        verification.submit(row)
    assert holding.wait(timeout=120)
    verification.close()
    assert begun == ["a"] and len(made) == 2


def test_giving_up_while_waiting_leaves_what_has_not_begun() -> None:
    release = threading.Event()
    begun: list[str] = []

    def judge(prompt: Prompt, text: str) -> Verdict:
        begun.append(text)
        release.wait(timeout=120)
        return Verdict.of(True)

    def poll() -> None:
        raise CancelledError("enough")

    verification = Verification(Source(judge), 1)  # type: ignore[arg-type]
    with pytest.raises(CancelledError):
        verification.collect(rows("a", "b", "c"), poll=poll)
    release.set()
    verification.collect(rows("d"))
    assert begun == ["a", "d"]
    verification.close()


def test_closing_ends_a_check_in_the_middle() -> None:
    verifier = MathVerifier(timeout=3600.0)
    started = threading.Event()

    def judge(prompt: Prompt, text: str) -> Verdict:
        started.set()
        return verifier.verify(prompt, text)

    source: Any = Source(judge)
    source.close = verifier.close
    assert verifier.verify(Prompt.make("q", answer="2"), "2").known  # the process runs
    verification = Verification(source, 1)
    (row,) = rows("9^9^9^9")
    row.prompt = Prompt.make("q", answer="2")
    verification.submit(row)
    assert started.wait(timeout=120)
    verification.close()  # within the time limit of the test, not of the check
