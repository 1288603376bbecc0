"""Verification of programs by running their tests in a sandbox (`opd.procs.sandbox`).

A prompt has its tests in the column `tests` (`prompts.keep_columns: [tests]`): Python source that raises if the program
is wrong, or a list of {"input": ..., "output": ...}, which is what the program reads and must print. White space at
line ends and standard error are ignored; a list in place of a text is its lines. The format of APPS and TACO,
{"inputs": [...], "outputs": [...]}, is accepted too, and either may be given as JSON text. Examples that call a
function are not supported. The program is the last fenced block of the completion, without any the text after a fence
that is not closed, or else the whole completion.
"""

import json
from contextlib import suppress
from typing import Any

from opd.procs.sandbox import Ended, Limits, Ran, check_machine, run_python
from opd.tasks.fences import fenced, unclosed
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict, Verifier

_CASE = {"input", "output"}
_CALLS = {"functional", "function_call"}
"""What LiveCodeBench (`testtype`) and DeepCoder (`type`) call an example that calls a function."""


class CodeVerifier(Verifier):
    """The program passes the prompt's tests, run in a sandbox.

    Correct if all tests pass; the share of examples that pass is partial credit.

    Unknown without tests, or if the sandbox itself fails. Programs that hang, fill the memory or are killed are wrong.

    Args:
        timeout: seconds that a program may take, for each of its examples.

    Raises:
        ConfigError: if the machine does not support the sandbox.
    """

    killed_is_wrong = True

    def __init__(self, timeout: float = 10.0) -> None:
        check_machine()
        self.limits = Limits(seconds=timeout)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        tests = prompt.extra.get("tests")
        if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
            with suppress(ValueError):  # source may begin like that too
                tests = json.loads(tests)
        if not tests or (isinstance(tests, str) and not tests.strip()):
            # This includes an empty list of examples, with which every program would be right.
            return Verdict.unknown("the prompt has no tests; list column 'tests' in prompts.keep_columns")
        program = find_program(completion)
        if isinstance(tests, str):
            return self._verdict([run_python(program, tests, limits=self.limits)])
        cases = _cases(tests)
        if cases is None:
            return Verdict.unknown(
                f"column 'tests' has {str(tests)[:80]!r}, which is neither source code nor a list of inputs and outputs"
            )
        if any(case.get("fn_name") or _CALLS & {case.get("testtype"), case.get("type")} for case in cases):
            return Verdict.unknown("column 'tests' has examples that call a function; write them as source")
        found = []
        for case in cases:
            fed, expected = _text_of(case["input"]), _text_of(case["output"])
            ran = run_python(program, stdin=fed, limits=self.limits)
            # Compared outside the sandbox, because the program's own process could claim anything.
            if ran.ended is Ended.PASSED and lines_of(ran.output) != lines_of(expected):
                ran = Ran(Ended.FAILED, ran.output, f"expected {expected[:80]!r}, got {ran.output[:80]!r}")
            found.append(ran)
            if ran.ended in (Ended.TIMED_OUT, Ended.KILLED):
                break  # the remaining examples would take as long
        return self._verdict(found, len(cases))

    def _verdict(self, found: list[Ran], count: int = 1) -> Verdict:
        bad: Any = next((ran for ran in found if ran.ended is not Ended.PASSED), None)
        if bad is None:
            return Verdict.of(True)
        forced = any(ran.ended in (Ended.TIMED_OUT, Ended.KILLED) for ran in found)
        if any(ran.ended is Ended.BROKEN for ran in found) or (forced and not self.killed_is_wrong):
            return Verdict.unknown(bad.reason)
        passed = sum(ran.ended is Ended.PASSED for ran in found)
        share = Verdict.score(passed / count)
        return Verdict(share.status, share.value, bad.reason)

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The program, without blank lines and white space at line ends."""
        return "\n".join(line.rstrip() for line in find_program(completion).splitlines() if line.strip()) or None

    def close(self) -> None:
        """Nothing to release, because each program has a process of its own."""


class LenientCodeVerifier(CodeVerifier):
    """Like code, but a program that was killed is unknown, not wrong.

    Like `code`, except that a program that hangs, fills the memory or is killed is unknown instead of wrong.
    """

    killed_is_wrong = False


def find_program(completion: str) -> str:
    """The last fenced block of a completion, without one what follows a fence that is not closed, or all of it."""
    if blocks := fenced(completion):
        return blocks[-1]
    rest = unclosed(completion)
    return completion if rest is None else rest


def _cases(tests: Any) -> list[dict[str, Any]] | None:
    """Examples as {"input": ..., "output": ...}; None if there are none."""
    if isinstance(tests, dict):
        inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            return None
        tests = [{"input": i, "output": o, "fn_name": name} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list) or not all(isinstance(case, dict) and case.keys() >= _CASE for case in tests):
        return None
    return tests or None


def _text_of(value: Any) -> str:
    """What a program reads or prints, as text; a list is joined as lines."""
    return "\n".join(str(line) for line in value) if isinstance(value, list) else str(value)


def lines_of(text: str) -> list[str]:
    """Lines without white space at their ends, and without blank lines at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
