"""Arithmetic with scratch work, one column at a time from the right: problems that small models can learn.

A prompt is "47+85=" and its worked solution "12 13:132": the sum of each column with its carry, as two digits, then the
result after a colon. Every step follows from the prompt and the steps before it, so a model can learn them one by one,
and an early mistake shows in what follows. Only the result is verified.
"""

from random import Random
from typing import ClassVar

from pydantic import Field

from opd.config import Settings
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict


class ArithmeticOptions(Settings):
    """The size of the problems."""

    digits: int = Field(default=2, ge=1, le=18, description="Maximum number of digits of the operands.")


class Arithmetic:
    """An arithmetic operation. Subclasses define how operands are drawn and worked on.

    `Prompt.extra["solution"]` holds the worked solution, for supervised training.
    """

    Options: ClassVar[type[Settings]] = ArithmeticOptions
    sign: ClassVar[str]
    domain: ClassVar[str]

    def __init__(self, options: ArithmeticOptions) -> None:
        self.options = options

    def operands(self, random: Random) -> tuple[int, int]:
        """Draw the two operands."""
        return random.randrange(10**self.options.digits), random.randrange(10**self.options.digits)

    def work(self, left: int, right: int) -> tuple[list[str], int]:
        """The scratch work, one entry per column from the right, and the result."""
        raise TypeError(f"{type(self).__name__} does not define work(left, right)")

    def expression(self, random: Random) -> tuple[str, str, str]:
        """A problem as (expression without the equals sign, worked solution, result)."""
        left, right = self.operands(random)
        columns, result = self.work(left, right)
        return f"{left}{self.sign}{right}", f"{' '.join(columns)}:{result}", str(result)

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        expression, solution, result = self.expression(random)
        return Prompt.make(f"{expression}=", answer=result, domain=self.domain, extra={"solution": solution})

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Compare what follows the last colon with the result."""
        result = completion.rpartition(":")[2].strip()
        return Verdict.of(result == prompt.answer, f"the result is {prompt.answer}, not {result[:40]!r}")

    def labels(self) -> Labels:
        """All problems have the domain of the operation and no teacher."""
        return frozenset({(None, self.domain)})

    def close(self) -> None:
        """Nothing to release."""


def _digits(number: int, count: int) -> list[int]:
    """The `count` lowest decimal digits, lowest first."""
    return [number // 10**position % 10 for position in range(count)]


class Addition(Arithmetic):
    """Sums with column sums as scratch work.

    Sums: each column is digit + digit + carry, two digits.
    """

    sign = "+"
    domain = "addition"

    def work(self, left: int, right: int) -> tuple[list[str], int]:
        columns, carry = [], 0
        count = max(len(str(left)), len(str(right)))
        for a, b in zip(_digits(left, count), _digits(right, count), strict=True):
            total = a + b + carry
            columns.append(f"{total:02d}")
            carry = total // 10
        return columns, left + right


class Subtraction(Arithmetic):
    """Differences with digits and borrows as scratch work.

    Non-negative differences: each column is a digit of the result, then the borrow for the next column, 0 or 1.
    """

    sign = "-"
    domain = "subtraction"

    def operands(self, random: Random) -> tuple[int, int]:
        """Draw both operands, the larger first."""
        left, right = super().operands(random)
        return max(left, right), min(left, right)

    def work(self, left: int, right: int) -> tuple[list[str], int]:
        columns, borrow = [], 0
        count = len(str(left))
        for a, b in zip(_digits(left, count), _digits(right, count), strict=True):
            rest = a - b - borrow
            borrow = int(rest < 0)
            columns.append(f"{rest % 10}{borrow}")
        return columns, left - right


class Multiplication(Arithmetic):
    """A number times a digit, with column products as scratch work.

    A number times a digit: each column is digit * digit + carry, two digits.
    """

    sign = "*"
    domain = "multiplication"

    def operands(self, random: Random) -> tuple[int, int]:
        """Draw a number and a digit from 2 to 9."""
        return random.randrange(10**self.options.digits), random.randrange(2, 10)

    def work(self, left: int, right: int) -> tuple[list[str], int]:
        columns, carry = [], 0
        for digit in _digits(left, len(str(left))):
            product = digit * right + carry
            columns.append(f"{product:02d}")
            carry = product // 10
        return columns, left * right
