"""A digit lock: the smallest world in which one mistake leads to states that imitation never visits.

The prompt holds a program of M digits. The lock shows a register, which is one symbol. The right answer at position i
is (register + program[i]) mod 10 (the number of symbols), and becomes the new register. After a wrong answer a letter
is shown in its place, and only the answer "b" leaves that state, back to the same position. The lock opens after M
right answers, within a limit on turns. With `show: both` the program's next digit is shown beside the register, so that
each turn can be answered from what it shows, which a small model learns in a minute. A teacher trained only on perfect
runs has never seen a letter; a teacher that was also trained on recoveries has.

Example with program 31 and register 7: shown 7, answer 0 (7 + 3); shown 0, answer 1 (0 + 1); open.
"""

from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from opd.config import Settings
from opd.tasks.environments.base import EnvironmentTask, Observation, Standing
from opd.tasks.prompt import Prompt

LETTERS = "acdefghijk"
"""Letters shown in place of the register, indexed by the wrong digit; "b" is missing because it is the way out."""
LEAVE = "b"


class LockOptions(Settings):
    """Size of the lock."""

    digits: int = Field(
        12,
        ge=1,
        le=60,
        description="Number of digits of the program, M: the right answers that it takes to open the lock.",
    )
    turns: int = Field(
        18, ge=1, le=120, description="Maximum number of answers; after that the lock stays shut and the episode ends."
    )
    symbols: int = Field(10, ge=2, le=10, description="Number of different digits, from 0; sums are taken modulo it.")
    show: Literal["register", "both"] = Field(
        "register",
        description="What a turn shows: the register alone, so that the student must count its place in the program, "
        "or both the register and the program's next digit.",
    )
    slips: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability that a wrong answer and the way back from it come before a right one in a problem's "
        "known path, as far as turns allow. Raise it for paths that teach recovery from mistakes.",
    )

    @model_validator(mode="after")
    def _can_open(self) -> "LockOptions":
        if self.turns < self.digits:
            raise ValueError(f"turns is {self.turns}, fewer than the {self.digits} digits that open the lock; raise it")
        return self


class Lock(EnvironmentTask):
    """A lock of digits, with states to recover from."""

    Options: ClassVar[type[Settings]] = LockOptions
    name = "lock"

    def draw(self, random: Random) -> Prompt:
        """Draw a program and an initial register."""
        symbols = self.options.symbols
        program = "".join(random.choice("0123456789"[:symbols]) for _ in range(self.options.digits))
        register = random.randrange(symbols)
        path: list[str] = []
        slips: list[int] = []
        # A slip and the way back from it take two turns.
        value, spare = register, (self.options.turns - self.options.digits) // 2
        for digit in program:
            value = (value + int(digit)) % symbols
            if self.options.slips and len(slips) < spare and random.random() < self.options.slips:
                slips.append(len(path))
                path += [str((value + random.randint(1, symbols - 1)) % symbols), LEAVE]
            path.append(str(value))
        more: dict[str, Any] = {"slips": slips} if self.options.slips else {}
        return self.make_prompt(f"{program}:", path, program=program, register=register, **more)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode; shows the initial register."""
        self._program: str = prompt.extra["program"]
        self._register: int = prompt.extra["register"]
        self._place = self._turn = 0
        self._letter = ""
        return self._show()

    def step(self, action: str) -> Observation:
        """Take one answer: a digit, or "b" while a letter is shown."""
        self._turn += 1
        answer = action.strip()
        if self._letter:
            self._letter = "" if answer == LEAVE else self._wrong(answer)
        elif answer == str((self._register + int(self._program[self._place])) % self.options.symbols):
            self._register = int(answer)
            self._place += 1
        else:
            self._letter = self._wrong(answer)
        return self._show()

    def standing(self) -> Standing:
        """Count the right answers still needed, plus one for the way back if a letter is shown."""
        lost = bool(self._letter)
        return Standing(len(self._program) - self._place + lost, lost)

    def _wrong(self, answer: str) -> str:
        return LETTERS[int(answer)] if len(answer) == 1 and answer.isascii() and answer.isdigit() else LETTERS[-1]

    def _show(self) -> Observation:
        won = self._place == len(self._program)
        done = won or self._turn >= self.options.turns
        following = "" if won or self.options.show == "register" else self._program[self._place]
        return Observation(
            text="" if won else self._letter or f"{self._register}{following}",
            reward=(1.0 if won else 0.0) if done else None,
            done=done,
            success=won if done else None,
            info={
                "place": self._place,
                "lost": bool(self._letter),
                "state": f"{self._place}{self._letter or self._register}",
            },
        )
