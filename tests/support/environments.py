"""Environments that misbehave on demand."""

import os
import signal
import sys
import time
from typing import Any, ClassVar

from opd.config import Settings
from opd.tasks.environments import Observation
from opd.tasks.environments.base import NoPlaceError
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.prompt import Prompt
from opd_zoo.environments.alfworld import ALFWorld, ALFWorldOptions
from opd_zoo.environments.scienceworld import ScienceWorld, ScienceWorldOptions
from opd_zoo.environments.simulated import Simulated, SimulatedOptions
from opd_zoo.environments.textworld import TextWorld, TextWorldOptions


class Naughty:
    """Does what the action says."""

    Options: ClassVar[type[Settings]] = Settings

    def __init__(self, options: Settings) -> None:
        self.turn = 0

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.turn = 0
        if prompt.text == "raise":
            raise ValueError("as asked")
        return Observation(prompt.text or "")

    def step(self, action: str) -> Any:
        self.turn += 1
        if action == "raise":
            raise ValueError("as asked")
        if action == "leave":
            raise SystemExit("as asked")
        if action == "hang":
            time.sleep(1000)
        if action == "exit":
            os._exit(3)
        while action == "endless":
            sys._getframe(2).f_locals["connection"].sendall(b"x" * 2**16)  # the child's
        if action == "number":
            return 7
        if action == "surrogate":
            return Observation("\ud800")
        if action == "tools":
            return Observation("", tools=("hammer",))  # type: ignore[arg-type]
        if action == "calls":
            return Observation("", info={"bad_calls": "many"})
        if action == "bytes":
            return Observation(b"x")  # type: ignore[arg-type]
        if action == "gigabytes":
            return Observation(str(len(bytearray(2**31))))
        text = {"megabytes": "x" * 2**21, "pid": str(os.getpid())}.get(action, f"you said {action}, {self.turn}")
        return Observation(text)

    def close(self) -> None:
        pass


class Chatty(Naughty):
    """Prints more than a pipe holds, when it is made and at every step."""

    def __init__(self, options: Settings) -> None:
        super().__init__(options)
        self._talk()

    def step(self, action: str) -> Any:
        self._talk()
        return super().step(action)

    def _talk(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            print("word " * 50_000, file=stream, flush=True)


class Pair(Naughty):
    """Two agents in turn; the solver ends it."""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.turn = 0
        return Observation("", info={"agent": "solver"})

    def step(self, action: str) -> Observation:
        self.turn += 1
        return Observation(action, info={"agent": ("solver", "critic")[self.turn % 2]}, done=self.turn == 3, reward=1.0)


class Profiled(Naughty):
    """Measures actions: digits are correct, an odd one covers all of the time and an even one none."""

    def step(self, action: str) -> Observation:
        self.turn += 1
        digits = [int(letter) for letter in action if letter.isdigit()]
        measures = {"correct": bool(digits), "speedup": sum(digits) / 4, "coverage": sum(digits) % 2, "name": "x"}
        return Observation("", info={"measures": measures}, done=self.turn == 2, success=bool(digits), reward=0.0)


class Stillborn(Naughty):
    """Cannot be made."""

    def __init__(self, options: Settings) -> None:
        raise RuntimeError("no licence")


class Unending(Naughty):
    """Is never made."""

    def __init__(self, options: Settings) -> None:
        while True:
            signal.pause()


class Dawdling(Naughty):
    """Is made once, by the host, and never again."""

    made = False

    def __init__(self, options: Settings) -> None:
        super().__init__(options)
        while Dawdling.made:
            signal.pause()
        Dawdling.made = True


class WhenToKill(Settings):
    """Settings of a deadly environment."""

    after: str = ""
    flag: str = ""


class Deadly:
    """Kills its own process once, at the second turn after the file `after` is there, while `flag` is not."""

    options: Any
    turn = 0

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.turn = 0
        return super().reset(prompt, seed)  # type: ignore[misc, no-any-return]

    def step(self, action: str) -> Observation:
        self.turn += 1
        if self.turn == 2 and os.path.exists(self.options.after) and not os.path.exists(self.options.flag):
            open(self.options.flag, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)  # type: ignore[misc, no-any-return]


class DeadlyLockOptions(WhenToKill, LockOptions): ...


class DeadlyLock(Deadly, Lock):
    """A lock that kills."""

    Options = DeadlyLockOptions
    name = "tests.support.environments:DeadlyLock"


class DeadlyGameOptions(WhenToKill, TextWorldOptions): ...


class DeadlyGame(Deadly, TextWorld):
    """A game that kills."""

    Options = DeadlyGameOptions
    name = "tests.support.environments:DeadlyGame"


class DeadlyHouseholdOptions(WhenToKill, ALFWorldOptions): ...


class DeadlyHousehold(Deadly, ALFWorld):
    """A household that kills."""

    Options = DeadlyHouseholdOptions
    name = "tests.support.environments:DeadlyHousehold"


class DeadlyExperimentOptions(WhenToKill, ScienceWorldOptions): ...


class DeadlyExperiment(Deadly, ScienceWorld):
    """An experiment that kills."""

    Options = DeadlyExperimentOptions
    name = "tests.support.environments:DeadlyExperiment"


class DeadlySimulatedOptions(WhenToKill, SimulatedOptions): ...


class DeadlySimulated(Deadly, Simulated):
    """A simulated world that kills."""

    Options = DeadlySimulatedOptions
    name = "tests.support.environments:DeadlySimulated"


WAYS = ("reset", "step", "number", "bytes", "megabytes", "fine", "fine", "fine", "fine", "fine")
"""What goes wrong with an unruly lock, by the last digit of its program."""


class Unruly(Lock):
    """A lock that goes wrong in half of its problems, and raises whenever it is closed after an episode."""

    name = "tests.support.environments:Unruly"
    way = ""

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.way = WAYS[int(prompt.extra["program"][-1])]
        if self.way == "reset":
            raise OSError("as asked")
        return super().reset(prompt, seed)

    def step(self, action: str) -> Any:
        seen = super().step(action)
        if self._turn < 2 or self.way == "fine":
            return seen
        if self.way == "step":
            raise ValueError("as asked")
        return {"number": 7, "bytes": Observation(b"x"), "megabytes": Observation("x" * 2**21)}[self.way]  # type: ignore[arg-type]

    def close(self) -> None:
        if self.way:
            raise OSError("as asked")


class Seeded:
    """Says its seed and ends."""

    Options: ClassVar[type[Settings]] = Settings

    def __init__(self, options: Settings) -> None: ...

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        return Observation(str(seed % 10**6))

    def step(self, action: str) -> Observation:
        return Observation("", done=True)

    def close(self) -> None: ...


class Useless(Lock):
    """A lock that cannot be begun."""

    name = "tests.support.environments:Useless"

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        raise OSError("as asked")


class Mortal:
    """Ends its process at the 25th action that its episodes take together, two each."""

    Options = Settings
    actions = 0

    def __init__(self, options: Settings) -> None: ...

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self.turns = 0
        return Observation("go")

    def step(self, action: str) -> Observation:
        Mortal.actions += 1
        if Mortal.actions == 25:
            os._exit(3)
        self.turns += 1
        done = self.turns == 2
        return Observation("on", reward=1.0 if done else None, done=done, success=True if done else None)

    def close(self) -> None: ...


class CrowdedOptions(LockOptions):
    """How many locks there are."""

    places: int = 2


class Crowded(Lock):
    """A lock of which only a few exist: one is taken by an episode and kept until it is closed."""

    Options = CrowdedOptions
    name = "tests.support.environments:Crowded"
    taken: ClassVar[int] = 0
    mine = False

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        if not self.mine:
            if Crowded.taken >= self.options.places:
                raise NoPlaceError("all locks are taken")
            Crowded.taken, self.mine = Crowded.taken + 1, True
        return super().reset(prompt, seed)

    def close(self) -> None:
        Crowded.taken, self.mine = Crowded.taken - self.mine, False
