"""Plays many episodes at once, each in its own process, with a time limit for every call.

    with EnvironmentPool({"name": "lock"}, PoolSettings()) as pool:
        seen = pool.reset({0: (prompt, 7), 1: (other, 8)})      # {0: Observation, 1: Observation}
        seen = pool.step({0: "4", 1: "b"})

An environment that raises, hangs, dies or gives an invalid answer costs only its own episode: its answer is an
`EpisodeError`, and its slot gets a fresh process for the next episode. Nothing is retried.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError, DataError, one_line
from opd.strict_json import read_json
from opd.tasks.environments.base import Observation
from opd.tasks.environments.host import LIMIT, prompt_to_dict
from opd.tasks.prompt import Prompt
from opd.tasks.worker import python_path

Failure = Literal["raised", "hung", "died", "invalid", "diverged", "full"]
_MOST_REASON = 500


class PoolSettings(Settings):
    """Limits of episodes."""

    step_seconds: float = Field(
        30.0,
        gt=0,
        description="Seconds that one action of an episode may take; after that its environment counts as hung.",
    )
    reset_seconds: float = Field(
        120.0, gt=0, description="Seconds that importing an environment, or starting an episode, may take."
    )
    text_characters: int = Field(
        32_768, ge=1, description="Maximum characters of an observation; a longer one ends the episode with an error."
    )
    memory_mib: int = Field(0, ge=0, description="Memory limit of one environment's process in MiB; 0 means no limit.")


@dataclass(frozen=True, slots=True)
class EpisodeError:
    """Why an episode broke.

    Attributes:
        kind: raised (the environment raised an exception), hung (over the time limit), died (its process ended),
            invalid (its answer is not an observation), diverged (a repeated action got a different answer) or full
            (the episode did not begin, because all places of the environment are taken).
        reason: one clause for people to read, on one line.
    """

    kind: Failure
    reason: str

    @classmethod
    def of(cls, kind: Failure, reason: str) -> "EpisodeError":
        """An error whose reason comes from elsewhere, and is shortened."""
        return cls(kind, one_line(reason, _MOST_REASON))


class EnvironmentPool:
    """Processes that play episodes of one environment.

    Args:
        spec: {"name": registered name or dotted path, "options": its settings}.
        settings: the limits.

    Attributes:
        failures: number of broken episodes, by kind.

    Raises:
        ConfigError: if the environment cannot be made; the message includes the reason.
    """

    def __init__(self, spec: Mapping[str, Any], settings: PoolSettings | None = None) -> None:
        self.settings = settings or PoolSettings()
        self.failures: Counter[str] = Counter()
        self._slots: dict[int, _Slot] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="opd-env-")
        self._path = os.path.join(self._folder.name, "host")
        self._spec = json.dumps({**spec, "memory_mib": self.settings.memory_mib})
        reason = self._start_host()
        if reason:
            self.close()
            raise ConfigError(f"environment {spec.get('name')!r} cannot be made: {reason.rstrip('.')}.")

    def _start_host(self) -> str:
        """Start the host; returns "" once it is ready, else a clause that says why it cannot serve."""
        errors = os.path.join(self._folder.name, "errors")
        # Errors go to a file: a pipe would have to be read meanwhile, or a host that writes much would block on it.
        with open(errors, "wb") as told:
            self._host = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "opd.tasks.environments.host", self._path, self._spec],
                env={**os.environ, "PYTHONPATH": python_path()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                start_new_session=True,  # what a terminal or a scheduler sends to the whole group is for this process
            )
        assert self._host.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._host.stdout, selectors.EVENT_READ)
            if not selector.select(self.settings.reset_seconds):
                self._host.kill()
                return f"it was not imported within {self.settings.reset_seconds:g} s; raise limits.reset_seconds."
        if self._host.stdout.readline().strip() == "ready":
            return ""
        self._host.wait()
        with open(errors, encoding="utf-8", errors="replace") as told:
            said = told.read().strip().splitlines()
        return said[-1] if said else "it died"

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset(self, episodes: Mapping[int, tuple[Prompt, int]]) -> dict[int, "Observation | EpisodeError"]:
        """Begin episodes, from the prompt and seed of each; the keys are numbers chosen by the caller."""
        broken: dict[int, Observation | EpisodeError] = {}
        if self._host.poll() is not None and not episodes.keys() <= self._slots.keys():
            # The host may have been killed, for example for its memory. Without it a slot cannot get a process; slots
            # that have one keep playing.
            self._end_host()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._start_host()
        for number in episodes:
            if number not in self._slots:
                try:
                    self._slots[number] = _Slot(self._path, self.settings.reset_seconds)
                except OSError as error:  # the host is gone, or could not fork
                    broken[number] = self._fail(number, "died", f"no process can be started for it ({error})")
        requests = {
            number: {"call": "reset", "prompt": prompt_to_dict(prompt), "seed": seed}
            for number, (prompt, seed) in episodes.items()
            if number not in broken
        }
        answers = broken | self._ask(requests, self.settings.reset_seconds)
        return {number: answers[number] for number in episodes}

    def step(self, actions: Mapping[int, str]) -> dict[int, "Observation | EpisodeError"]:
        """Carry out an action in each of the given episodes, which must have begun and neither ended nor broken."""
        return self._ask(
            {number: {"call": "step", "action": action} for number, action in actions.items()},
            self.settings.step_seconds,
        )

    def close(self) -> None:
        """Stop all processes."""
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._end_host()
        self._folder.cleanup()

    def _end_host(self) -> None:
        if self._host.stdin is not None:
            self._host.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._host.wait(timeout=5)
        if self._host.poll() is None:
            self._host.kill()
            self._host.wait()
        if self._host.stdout is not None:
            self._host.stdout.close()

    def _ask(self, requests: Mapping[int, dict[str, Any]], seconds: float) -> dict[int, "Observation | EpisodeError"]:
        """Send all requests, then wait for all answers; each answer has `seconds` from when its request was sent."""
        answers: dict[int, Observation | EpisodeError] = {}
        deadlines: dict[int, float] = {}
        with selectors.DefaultSelector() as selector:
            # All requests are sent before any answer is awaited, so that the episodes run at the same time.
            for number, request in requests.items():
                slot = self._slots[number]
                try:
                    slot.connection.settimeout(seconds)  # sending blocks if the request exceeds the buffer
                    slot.send(request)
                except TimeoutError:
                    answers[number] = self._fail(number, "hung", f"it read nothing within {seconds:g} s")
                    continue
                except OSError as error:
                    answers[number] = self._fail(number, "died", f"its process is gone ({error.strerror})")
                    continue
                deadlines[number] = time.monotonic() + seconds
                selector.register(slot.connection, selectors.EVENT_READ, number)
            while deadlines:
                wait = max(0.0, min(deadlines.values()) - time.monotonic())
                for key, _ in selector.select(wait):
                    number = int(key.data)
                    try:
                        line = self._slots[number].receive()
                    except OSError:
                        line = b""
                    # None means that only part of an answer has come; b"" means that the process has ended.
                    if line is None:
                        continue
                    selector.unregister(key.fileobj)
                    del deadlines[number]
                    answers[number] = self._read(number, line)
                for number in [n for n, deadline in deadlines.items() if deadline <= time.monotonic()]:
                    selector.unregister(self._slots[number].connection)
                    del deadlines[number]
                    answers[number] = self._fail(number, "hung", f"no answer within {seconds:g} s")
        return {number: answers[number] for number in requests}

    def _read(self, number: int, line: bytes) -> "Observation | EpisodeError":
        if not line:
            return self._fail(number, "died", "its process ended")
        try:
            reply = read_json(line)
            if "error" in reply:
                return self._fail(number, "full" if reply.get("full") else "raised", reply["error"])
            return Observation.from_dict(reply["observation"], longest=self.settings.text_characters)
        except DataError as error:
            return self._fail(number, "invalid", str(error))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return self._fail(number, "invalid", f"its answer is not understood ({error})")

    def _fail(self, number: int, kind: Failure, reason: str) -> EpisodeError:
        self.failures[kind] += 1
        slot = self._slots.pop(number, None)
        if slot is not None:
            slot.close(kill=True)
        return EpisodeError.of(kind, reason)


class _Slot:
    """The pool's end of one child.

    Args:
        path: path of the host's socket.
        seconds: how long the host may take to fork the child.

    Raises:
        OSError: if it has not done so by then.
    """

    def __init__(self, path: str, seconds: float) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.connection.settimeout(seconds)
            self.connection.connect(path)
            self._pending = bytearray()
            while b"\n" not in self._pending:
                part = self.connection.recv(64)
                if not part:
                    raise ConnectionResetError("the host hung up")
                self._pending += part
        except OSError:
            self.connection.close()
            raise
        pid, _, self._pending = self._pending.partition(b"\n")
        self._pid = int(pid)

    def send(self, request: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> bytes | None:
        """A whole line, or the start of an endless one; None if it is not complete yet, b"" if the child is gone."""
        part = self.connection.recv(1 << 16)
        self._pending += part
        if not part:
            return b""
        if b"\n" not in part:
            return None if len(self._pending) <= LIMIT else bytes(self._pending[:100])
        line, _, self._pending = self._pending.partition(b"\n")
        return bytes(line)

    def close(self, *, kill: bool = False) -> None:
        self.connection.close()
        if kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
