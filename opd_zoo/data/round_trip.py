"""CodeV-R1's data: problems made from programs, with tests, kept where the way from program to words and back works.

    words      a model describes the program as a problem
    tests      the model names inputs; the outputs are those of the program itself, run in the sandbox
    back       a program that the model writes from the words alone gives the same outputs:   the row is kept

The tests are examples of inputs and outputs, as verifier `code` reads them. Inputs on which the program fails are
dropped; without `least` others, or where all outputs are equal, tests would tell nothing and nothing is made of the
row. Source: CodeV-R1, arXiv 2505.24183 (abstract: a testbench generator that compares with a golden reference, and
round-trip synthesis), for Python programs instead of Verilog; the questions are ours.
"""

from collections.abc import Mapping
from typing import Any

from opd.procs.sandbox import Ended, Limits, run_python
from opd.tasks.chat import ChatClient, object_in
from opd.tasks.code import CodeVerifier
from opd.tasks.prompt import Prompt
from opd_zoo.data.intervene import NotMade
from opd_zoo.prompts import filled

DESCRIBE = """A Python program:
{code}

Describe the problem that it solves, so that another person could write it without seeing it: what it reads from
standard input and what it prints, exactly. Write no code."""
INPUTS = """A Python program:
{code}

Write {count} texts to give it on standard input, which together exercise all of it, with special cases. Answer with
JSON alone: {"inputs": ["...", ...]}"""
SOLVE = "{problem}\n\nWrite a Python program. End with the whole program in one fenced block."


def round_tripped(
    row: Mapping[str, Any], client: ChatClient, verifier: CodeVerifier, *, count: int = 8, least: int = 3
) -> dict[str, Any]:
    """A problem with tests, made from the program in column `code`.

    Args:
        row: with a text `code`.
        client: the model that describes, names inputs and writes the program again.
        verifier: runs programs.
        count: number of inputs asked for.
        least: minimum number of inputs on which the program works.

    Raises:
        NotMade: if nothing can be made of the row.
        ChatFailed: if the model gave no answer.
    """
    code = row.get("code")
    if not isinstance(code, str) or not code.strip():
        raise NotMade("no text in column code")
    tests = tests_of(code, client, verifier.limits, count=count, least=least)
    problem = _asked(client, filled(DESCRIBE, {"code": code})).strip()
    again = _asked(client, filled(SOLVE, {"problem": problem}))
    if verifier.verify(Prompt.make(problem or "?", extra={"tests": tests}), again).value < 1.0:
        raise NotMade("the program written from the words does something else")
    return {"prompt": problem, "tests": tests, "solution": code} | {k: v for k, v in row.items() if k != "code"}


def tests_of(code: str, client: ChatClient, limits: Limits, *, count: int, least: int) -> list[dict[str, str]]:
    """Inputs that a model names, with the outputs of the program.

    Raises:
        NotMade: if they are too few, or all outputs are equal.
        ChatFailed: if the model gave no answer.
    """
    said = object_in(_asked(client, filled(INPUTS, {"code": code, "count": str(count)}))) or {}
    inputs = said.get("inputs")
    texts = list(dict.fromkeys(text for text in inputs if isinstance(text, str))) if isinstance(inputs, list) else []
    ran = [(text, run_python(code, stdin=text, limits=limits)) for text in texts[:count]]
    tests = [{"input": text, "output": found.output} for text, found in ran if found.ended is Ended.PASSED]
    if len(tests) < least:
        raise NotMade("the program works on too few of the inputs")
    if len({test["output"] for test in tests}) < 2:
        raise NotMade("all outputs are equal")
    return tests


def _asked(client: ChatClient, question: str) -> str:
    return client.ask([{"role": "user", "content": question}])
