"""Every error that a user can see: a class with an exit code and, where it crosses the wire, a gRPC status.

Server and client share this table: the server turns an `OpdError` into its gRPC status, the client turns a
status back into the class. A message names the thing, the value and the fix in one sentence.
"""

from collections.abc import Mapping
from typing import ClassVar


def one_line(error: object, most: int | None = None) -> str:
    """What `error` says as one line of at most `most` characters, without a full stop; its type where it says nothing.

    Libraries raise messages of several lines; ours quotes them inside a sentence.
    """
    return " ".join(str(error).split())[:most].rstrip(".") or type(error).__name__


class OpdError(Exception):
    """Base of all errors with a message for users.

    Attributes:
        exit_code: what the CLI exits with.
        final: the same command fails again until a person changes something; supervisors (deploy/) do not repeat it.
        status: name of the gRPC status code, or None when the error never crosses the wire.
    """

    exit_code: ClassVar[int] = 1
    final: ClassVar[bool] = False
    status: ClassVar[str | None] = None


class ConfigError(OpdError):
    """A recipe, flag or combination of settings that cannot work."""

    exit_code = 2
    final = True


class InvalidRequestError(OpdError):
    """A request that can never succeed: ids, lengths, k or temperature out of range, oversize."""

    exit_code = 3
    final = True
    status = "INVALID_ARGUMENT"


class TeacherNotFoundError(OpdError):
    """No such teacher on this server or in this fleet."""

    exit_code = 4
    status = "NOT_FOUND"


class IncompatibleTeacherError(OpdError):
    """Teacher and student do not fit: tokenizer, vocabulary, weights hash, capability or limit."""

    exit_code = 5
    final = True
    status = "FAILED_PRECONDITION"


class OverloadedError(OpdError):
    """The server has no budget left now.

    Attributes:
        retry_after: seconds after which to retry.
        usage: the server's budget, tokens and bytes by the fields of the contract's OverloadDetail.
    """

    exit_code = 6
    status = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after: float = 0.1, usage: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.usage = dict(usage or {})


class UnavailableError(OpdError):
    """A replica cannot be reached, is draining, or went away during the call."""

    exit_code = 7
    status = "UNAVAILABLE"


class DeadlineError(OpdError):
    """The deadline of a call passed."""

    exit_code = 8
    status = "DEADLINE_EXCEEDED"


class AuthError(OpdError):
    """Missing, wrong or expired credentials, or a TLS mismatch."""

    exit_code = 9
    status = "UNAUTHENTICATED"


class ScopeError(OpdError):
    """Credentials without the scope that the call needs."""

    exit_code = 9
    status = "PERMISSION_DENIED"


class CorruptPayloadError(OpdError):
    """A response that fails its checksum or breaks the contract: shapes, ids, probabilities, NaN."""

    exit_code = 10
    status = "DATA_LOSS"


class NonFiniteError(OpdError):
    """A model produced NaN or infinity: its numbers must not be trained on."""

    exit_code = 11
    status = "FAILED_PRECONDITION"


class CheckpointError(OpdError):
    """A checkpoint that is damaged, incomplete or from another run."""

    exit_code = 12
    final = True


class RunFolderError(OpdError):
    """A run folder that exists already or is in use, or one, or a store of scores, that cannot be written."""

    exit_code = 13


class DiskFullError(RunFolderError):
    """A run folder whose disk, or quota, has no space left: what waits for space can write it then."""


class PortInUseError(OpdError):
    """The address to listen on is taken."""

    exit_code = 14


class OutageError(OpdError):
    """A whole teacher pool stayed away beyond the outage budget; the run is saved and can be resumed."""

    exit_code = 15


class DataError(OpdError):
    """Prompts or a task that cannot be read or used."""

    exit_code = 16
    final = True


class DeviceMemoryError(OpdError):
    """Work that exceeds a device's memory: a teacher's sequence, even alone, or a student's micro-batch."""

    exit_code = 17
    status = "FAILED_PRECONDITION"


class StageError(OpdError):
    """A stage of a run of several jobs failed; what is done is kept, and the run can be resumed."""

    exit_code = 18


class RolloutEngineError(OpdError):
    """The engine that samples the student's answers cannot be restored, or does not hold the student's weights."""

    exit_code = 19


class RankLostError(OpdError):
    """Another rank of the run ended, without which this one cannot go on."""

    exit_code = 21


class PluginError(OpdError):
    """A plug-in whose class or results are not what its base class asks for."""

    exit_code = 22
    final = True


class UndecidedTeacherError(IncompatibleTeacherError):
    """Replicas of a teacher differ and no side has a majority, as in the middle of a change of weights: it may end."""

    exit_code = 23
    final = False


class CancelledError(OpdError):
    """The caller went away before the answer was ready."""

    exit_code = 130
    status = "CANCELLED"


def short(found: object) -> str:
    """What a plug-in gave, for a message: its value where that is short, else its type."""
    text = repr(found)
    return text if len(text) <= 40 else f"a {type(found).__name__}"


def all_errors() -> list[type[OpdError]]:
    """All concrete error classes, in the order of this file."""
    found: list[type[OpdError]] = []
    stack = [OpdError]
    while stack:
        for sub in stack.pop(0).__subclasses__():
            found.append(sub)
            stack.append(sub)
    return found


def from_status(status: str, message: str) -> OpdError:
    """The error class for a gRPC status name; unknown or transport statuses become `UnavailableError`.

    Args:
        status: name of a gRPC status code, for example "NOT_FOUND".
        message: the server's sentence.
    """
    first: dict[str, type[OpdError]] = {}
    for cls in all_errors():
        if cls.status is not None:
            first.setdefault(cls.status, cls)
    return first.get(status, UnavailableError)(message)
