import sys
import threading

import psutil
import pytest

from opd.procs.children import ChildFailed
from opd.tasks import Prompt, VerdictStatus, maths
from opd.tasks.maths import MathVerifier

CASES = [
    ("42", "So the answer is 42.", "correct"),
    ("42", "So the answer is 41.", "wrong"),
    ("1/2", r"thus \boxed{0.5}", "correct"),
    (r"\frac{1}{2}", "$0.5$", "correct"),
    (r"$x^2-1$", r"\boxed{(x-1)(x+1)}", "correct"),
    ("1,000", r"\boxed{1000}", "correct"),
    ("3", "no number here", "wrong"),
    ("3", r"\frac{", "wrong"),
    (r"\$5", r"\boxed{5}", "correct"),
    (r"\$1,234.50", "it costs $1234.50$", "correct"),
    (r"\begin{pmatrix} x \\[2pt] 2 \end{pmatrix}", r"\boxed{2}", "wrong"),
    ("0.001", r"\boxed{1e-3}", "correct"),
    ("1.2e5", "The answer is 120000.", "correct"),
    ("1", "The answer is 1e-3.", "wrong"),
    ("2e-1", r"\boxed{2e - 1}", "correct"),  # Euler's number
    ("3/2", r"\boxed{1 1/2}", "correct"),
    ("2 3/4", r"\boxed{\frac{11}{4}}", "correct"),
    ("-1.5", "The answer is -1 1/2.", "correct"),
    ("1", "The answer is 1 1/2.", "wrong"),
    ("45", r"\boxed{45°}", "correct"),
    ("60", r"\boxed{30°, 60°}", "wrong"),
    ("18", r"\boxed{18 dollars}", "correct"),
    ("18 dollars", "so it costs $18$.", "correct"),
    ("1/2 cup", r"\boxed{\frac{1}{2}}", "correct"),
    ("5", r"\boxed{5 bags of rice}", "correct"),
    ("18 dollars", r"\boxed{19 dollars}", "wrong"),
    ("18", r"\boxed{18 dollars and 50 cents}", "wrong"),
    ("3", r"\boxed{3 xyz}", "wrong"),
    ("3", r"\boxed{3abcd}", "wrong"),
    ("2", r"\boxed{2 times x}", "wrong"),
    ("3", "He has 5 apples and $3$ pears are left.", "correct"),
    ("5", "He has 5 apples per $3$ pears.", "wrong"),
    ("2", r"\boxed{2 \sin x}", "wrong"),
    ("5 m", r"\boxed{5 g}", "wrong"),
    ("5 km", r"$x = 5\,\mathrm{cm}$", "wrong"),
    ("5t", "The answer is 5h.", "wrong"),
    (r"5\text{ m}", r"\boxed{5m}", "correct"),
    ("5 m", r"first $7 g$, then \boxed{5 m}, or $5 g$", "correct"),
    ("5 m", r"\boxed{5} for $5 g$", "correct"),
    ("5 min", r"\boxed{5 m}", "correct"),
    ("5", r"\boxed{5 g}", "correct"),
    (None, "3", "unknown"),
]


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(timeout=60.0)
    yield verifier
    verifier.close()


@pytest.mark.parametrize(("answer", "completion", "status"), CASES)
def test_answers_are_compared_mathematically(verifier, answer, completion, status):
    assert verifier.verify(Prompt.make("q", answer=answer), completion).status == status


def test_it_works_in_threads_other_than_the_main_one(verifier):
    found = []
    thread = threading.Thread(target=lambda: found.append(verifier.verify(Prompt.make("q", answer="2"), "2")))
    thread.start()
    thread.join()
    assert found[0].status is VerdictStatus.CORRECT


def test_a_check_that_takes_too_long_is_unknown():
    verifier = MathVerifier(timeout=60.0)
    assert verifier.verify(Prompt.make("q", answer="2"), "2").known
    verifier._workers.timeout = 0.5
    verdict = verifier.verify(Prompt.make("q", answer="2"), "9^9^9^9")
    verifier.close()
    assert verdict.status is VerdictStatus.UNKNOWN and "no answer within" in verdict.reason


@pytest.mark.parametrize("order", [("verify", "extract"), ("extract", "verify")])
def test_a_completion_takes_the_limit_once_for_both_checks(order, monkeypatch):
    verifier, prompt, asked = MathVerifier(timeout=60.0), Prompt.make("q", answer="2"), []

    def ask(request):
        asked.append(request)
        if "9^9^9^9" in request.values():
            raise ChildFailed("hung", "no answer within 60 s")
        return {"right": True, "reason": "", "answer": "2"}

    monkeypatch.setattr(verifier._workers, "ask", ask)
    for check in order:
        found = getattr(verifier, check)(prompt, "9^9^9^9")
        assert found is None or not found.known
    assert len(asked) == 1
    assert verifier.verify(prompt, "2").known and verifier.extract(prompt, "2") == "2"
    verifier.verify(prompt, "9^9^9^9")  # a machine that was busy once decides nothing for later
    assert len(asked) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_the_memory_of_checks_is_bounded(verifier):
    verifier.verify(Prompt.make("q", answer="2"), "2")
    bounds = [psutil.Process(worker.pid).rlimit(psutil.RLIMIT_DATA)[0] for worker in verifier._workers._idle]
    assert bounds and all(0 < bound <= 2 * 2**30 for bound in bounds)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        (r"<think>\boxed{4}</think> so it is 5", True),
        (r"<think>\boxed{5}</think> so it is 4", False),
        (r"<think>\boxed{4}</think>\boxed{5}", True),
        (r"<think>it is \boxed{5}</think>", True),
        (r"[THINK]\boxed{4}[/THINK] The answer is 5.", True),
    ],
)
def test_the_answer_behind_the_thinking_counts(completion, right):
    found = maths.check({"completion": completion, "reference": "5"})
    assert found["right"] is right
    assert (maths.check({"extract": completion})["answer"] == maths.check({"extract": "5"})["answer"]) is right
