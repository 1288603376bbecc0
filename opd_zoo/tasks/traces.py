"""Long answers of three kinds, which an adaptive rollout window should distinguish.

- `restate`: the result is worked out first and then only repeated, so a prefix contains all there is to learn.
- `running_sum`: one skill is used over and over, so a prefix teaches what the rest needs.
- `parts`: different skills follow one another, so a prefix says nothing about the later ones.
"""

from random import Random
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from opd.config import Settings
from opd.tasks.arithmetic import Addition, Arithmetic, ArithmeticOptions, Multiplication, Subtraction
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict

_OPERATIONS: dict[str, type[Arithmetic]] = {
    "addition": Addition,
    "subtraction": Subtraction,
    "multiplication": Multiplication,
}


class _WholeAnswer:
    """Base class of these tasks: the answer is `Prompt.answer`, and each task has its own rule for comparing it."""

    domain: ClassVar[str]

    def _prompt(self, text: str, solution: str, answer: str) -> Prompt:
        return Prompt.make(f"{text}=", answer=answer, domain=self.domain, extra={"solution": solution})

    def labels(self) -> Labels:
        """All problems have the domain of the task and no teacher."""
        return frozenset({(None, self.domain)})

    def close(self) -> None:
        """Nothing to release."""


class RestateOptions(ArithmeticOptions):
    """The size of the sum and the length of the tail."""

    times: int = Field(
        default=6, ge=1, le=64, description="Number of times that the result must be repeated after it was found."
    )


class Restate(_WholeAnswer):
    """A sum whose result is restated: the tail follows from the prefix.

    A sum whose result is repeated: "47+85=" gives "12 13:132:132:132"; every repetition is verified.
    """

    Options: ClassVar[type[Settings]] = RestateOptions
    domain = "restate"

    def __init__(self, options: RestateOptions) -> None:
        self.options = options
        self._addition = Addition(ArithmeticOptions(digits=options.digits))

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        text, solution, result = self._addition.expression(random)
        return self._prompt(text, solution + f":{result}" * self.options.times, result)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Correct if the result and all its repetitions are right."""
        found = completion.strip().split(":")[1:]
        wanted = [prompt.answer] * (self.options.times + 1)
        return Verdict.of(found == wanted, f"expected {len(wanted)} times {prompt.answer}")


class RunningSumOptions(Settings):
    """The length of the chain, and how solutions are written."""

    terms: int = Field(default=8, ge=2, le=128, description="Number of terms that are added or subtracted.")
    every: int = Field(
        default=1,
        ge=0,
        description="Which running totals a solution writes: 1 for all, 2 for every second one, and so on; 0 for none.",
    )
    silent: int = Field(
        default=0,
        ge=0,
        description="Number of running totals at the beginning that a solution leaves out, so that they must be taken "
        "in one step.",
    )
    largest: int = Field(default=9, ge=1, le=9, description="Largest term; terms are drawn from 1 to it.")
    modulo: int = Field(
        default=0,
        ge=0,
        le=100,
        description="Number modulo which totals are taken, and then terms are only added; 0 means no modulus, with "
        "totals from 0 to 99.",
    )
    mark: str = Field(
        default="", description="Text put before each problem, so that a student can be asked for one way of writing."
    )
    told: bool = Field(default=False, description="Put the last total before the problem, as a hint would: `3;3+8+2=`.")

    @model_validator(mode="after")
    def _totals(self) -> "RunningSumOptions":
        if self.modulo == 1:
            raise ValueError("modulo is 1, which would make every total 0; use 0, or a number from 2 to 100")
        return self


class RunningSum(_WholeAnswer):
    """A long trace that repeats one skill: running totals.

    A chain of small sums: "3+8-2=" gives "11 9:9". Totals stay within 0 to 99, and the last one is verified.

    With `every` 3, a solution writes only each third total; with `silent` 5, all but the first five; with `every` 0,
    only the answer. This gives the same problem in several lengths, for modes with thinking budgets. The last total is
    a weighted sum of the numbers, which a model may learn without writing any other total; `modulo` prevents that:
    "3+8+2=" gives "1 3:3" modulo 10.
    """

    Options: ClassVar[type[Settings]] = RunningSumOptions
    domain = "running_sum"

    def __init__(self, options: RunningSumOptions) -> None:
        self.options = options

    def draw(self, random: Random) -> Prompt:
        """Draw a problem."""
        options = self.options
        bound, modulo = options.largest + 1, options.modulo or 100
        total = random.randrange(1, bound)
        text, totals = str(total), list[str]()
        for _ in range(options.terms - 1):
            term = random.randrange(1, bound)
            # Up if down would fall below 0, down if up would exceed 99, else either.
            down = not options.modulo and (total + term > 99 or (total >= term and random.random() < 0.5))
            total = (total - term if down else total + term) % modulo
            text += f"{'-' if down else '+'}{term}"
            totals.append(str(total))
        every = options.every
        shown = totals[options.silent :][every - 1 :: every] if every else []
        told = f"{total};" if options.told else ""
        return self._prompt(f"{told}{options.mark}{text}", f"{' '.join(shown)}:{total}", str(total))

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Compare what follows the last colon with the final total."""
        result = completion.rpartition(":")[2].strip()
        return Verdict.of(result == prompt.answer, f"the total is {prompt.answer}, not {result[:40]!r}")


class PartsOptions(ArithmeticOptions):
    """Which skills follow one another."""

    operations: list[Literal["addition", "subtraction", "multiplication"]] = Field(
        default=["addition", "subtraction", "multiplication"],
        min_length=1,
        description="Kinds of problems in a prompt, in their order.",
    )


class Parts(_WholeAnswer):
    """Several problems of different kinds: every part needs its own skill.

    Problems of different kinds in one prompt: "4+8;9-2=" gives "12:12;70:7"; value is the share of right parts.
    """

    Options: ClassVar[type[Settings]] = PartsOptions
    domain = "parts"

    def __init__(self, options: PartsOptions) -> None:
        self.options = options
        single = ArithmeticOptions(digits=options.digits)
        self._tasks = [_OPERATIONS[name](single) for name in options.operations]

    def draw(self, random: Random) -> Prompt:
        """Draw a prompt with all its parts."""
        texts, solutions, results = zip(*(task.expression(random) for task in self._tasks), strict=True)
        return self._prompt(";".join(texts), ";".join(solutions), ";".join(results))

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Compare each part's result, after its colon; missing and additional parts count as wrong."""
        found = [part.rpartition(":")[2].strip() for part in completion.strip().split(";")]
        wanted = str(prompt.answer).split(";")
        right = sum(a == b for a, b in zip(found, wanted, strict=False))
        return Verdict.score(right / max(len(found), len(wanted)))
