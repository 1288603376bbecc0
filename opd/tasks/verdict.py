"""A verifier's verdict on an answer: correct, wrong, or unknown."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from opd.errors import short
from opd.files import as_bytes
from opd.tasks.prompt import Prompt

NO_REFERENCE = "the prompt has no reference answer"
"""The reason for an unknown verdict on an open question, which is not a fault."""


class VerdictStatus(StrEnum):
    """How a check ended. `UNKNOWN` (no reference answer, time-out, crash) never counts as wrong."""

    CORRECT = "correct"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of checking a completion.

    Attributes:
        status: correct, wrong or unknown.
        value: score in [0, 1]: 1 if correct, below 1 if wrong (partial credit is possible), 0 if unknown.
        reason: one clause for people; empty if there is nothing to say. What cannot be written is replaced by its
            escape, because reasons quote answers and errors.
    """

    status: VerdictStatus
    value: float
    reason: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"value of a verdict must be in [0, 1], but it is {self.value}")
        object.__setattr__(self, "reason", as_bytes(self.reason).decode())

    @property
    def known(self) -> bool:
        """Whether the verifier reached a conclusion."""
        return self.status is not VerdictStatus.UNKNOWN

    @classmethod
    def of(cls, right: bool, reason: str = "") -> "Verdict":
        """Correct with value 1, or wrong with value 0."""
        return cls(VerdictStatus.CORRECT, 1.0) if right else cls(VerdictStatus.WRONG, 0.0, reason)

    @classmethod
    def score(cls, value: float) -> "Verdict":
        """Correct if the value is 1, else wrong with partial credit; `value` is clipped to [0, 1]."""
        value = min(max(float(value), 0.0), 1.0)
        return cls(VerdictStatus.CORRECT if value >= 1.0 else VerdictStatus.WRONG, value)

    @classmethod
    def partial(cls, value: float) -> "Verdict":
        """Wrong, with partial credit; `value` is clipped to [0, 1]."""
        return cls(VerdictStatus.WRONG, min(max(float(value), 0.0), 1.0))

    @classmethod
    def unknown(cls, reason: str) -> "Verdict":
        """Unknown, for the given reason."""
        return cls(VerdictStatus.UNKNOWN, 0.0, reason)


class Verifier(Protocol):
    """Checks completions; must be safe to call from several threads.

    It may also have a method `extract`, see `extracted`.
    """

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge `completion`, the decoded answer without special tokens; must not raise."""
        ...

    def close(self) -> None:
        """Stop worker processes; the verifier can be used again afterwards."""
        ...


class PlainVerifier(Verifier):
    """Base class of verifiers that compute in the calling thread and hold nothing open.

    Args:
        timeout: seconds that an answer may take.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        self.timeout = timeout

    def close(self) -> None:
        """Nothing to release."""


def extracted(judge: object, prompt: Prompt, completion: str) -> str | None:
    """The final answer in a completion, in a form that equal answers share; None if there is none.

    A verifier provides it with a method `extract(prompt, completion) -> str | None`. Without one, it is the whole
    completion with normalised white space. If the method fails, there is none.
    """
    method: Callable[[Prompt, str], str | None] | None = getattr(judge, "extract", None)
    if method is None:
        return " ".join(completion.split()) or None
    try:
        return method(prompt, completion)
    except Exception:
        return None


def guarded(check: Callable[[Prompt, str], Verdict], prompt: Prompt, completion: str) -> Verdict:
    """Run a check; an exception, or a result that is not a verdict, becomes an unknown verdict.

    A broken verifier says nothing about an answer.
    """
    try:
        verdict = check(prompt, completion)
    except Exception as error:
        return Verdict.unknown(f"the verifier failed with {type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict):
        return Verdict.unknown(f"the verifier returned {short(verdict)}; its method verify must return a Verdict")
    return verdict
