"""All errors that a user can see: classes with an exit code and, if they cross the wire, a gRPC status.

Server and client share this table: the server turns an `OpdError` into its gRPC status, and the client turns the status
back into the class. A message names the thing, the value and the fix in one sentence.
"""

from collections.abc import Mapping
from typing import ClassVar

from opd.printable import printable


def one_line(error: object, most: int | None = None) -> str:
    """The message of `error` on one line of at most `most` characters, without a full stop; its type if it has none.

    Libraries raise messages with several lines, which our messages quote inside a sentence.
    """
    return " ".join(str(error).split())[:most].rstrip(".") or type(error).__name__


class OpdError(Exception):
    """Base class of all errors with a message for users.

    Attributes:
        exit_code: exit code of the command line.
        final: whether the same command will fail again until a person changes something; supervisors (deploy/) then do
            not repeat it.
        status: name of the gRPC status code; None if the error never crosses the wire.
    """

    exit_code: ClassVar[int] = 1
    final: ClassVar[bool] = False
    status: ClassVar[str | None] = None


class ConfigError(OpdError):
    """A recipe, flag or combination of settings is not valid."""

    exit_code = 2
    final = True


class InvalidRequestError(OpdError):
    """A request can never succeed: ids, lengths, k or temperature are out of range, or it is too large."""

    exit_code = 3
    final = True
    status = "INVALID_ARGUMENT"


class TeacherNotFoundError(OpdError):
    """There is no such teacher on this server or in this fleet."""

    exit_code = 4
    status = "NOT_FOUND"


class IncompatibleTeacherError(OpdError):
    """Teacher and student do not fit together: tokenizer, vocabulary, weights hash, abilities or limits."""

    exit_code = 5
    final = True
    status = "FAILED_PRECONDITION"


class OverloadedError(OpdError):
    """The server has no budget left at present.

    Attributes:
        retry_after: seconds to wait before a retry.
        usage: the request's cost and the server's budgets, by the fields of the contract's OverloadDetail.
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
    """Credentials are missing, wrong or expired, or the two sides do not agree on TLS."""

    exit_code = 9
    final = True
    status = "UNAUTHENTICATED"


class ScopeError(OpdError):
    """The credentials lack the scope that the call needs."""

    exit_code = 9
    final = True
    status = "PERMISSION_DENIED"


class CorruptPayloadError(OpdError):
    """A response fails its checksum or violates the contract: shapes, ids, probabilities, NaN."""

    exit_code = 10
    status = "DATA_LOSS"


class NonFiniteError(OpdError):
    """A model produced NaN or infinity, which must not be trained on."""

    exit_code = 11
    status = "FAILED_PRECONDITION"


class CheckpointError(OpdError):
    """A checkpoint is damaged, incomplete or from another run."""

    exit_code = 12
    final = True


class RunFolderError(OpdError):
    """A run folder exists already or is in use, or a run folder or a store of scores cannot be written."""

    exit_code = 13


class DiskFullError(RunFolderError):
    """A run folder's disk or quota has no space left; once there is space, it can be written."""


class OutputError(RunFolderError):
    """Something else that a command writes cannot be written: a report, a merged model, a world of models."""


class PortInUseError(OpdError):
    """The address to listen on is in use."""

    exit_code = 14


class OutageError(OpdError):
    """A teacher was unavailable for longer than the outage budget; the run is saved and can be resumed."""

    exit_code = 15


class DataError(OpdError):
    """Prompts or a task cannot be read or used."""

    exit_code = 16
    final = True


class DeviceMemoryError(OpdError):
    """Work exceeds a device's memory: a teacher's sequence, even by itself, or a student's micro-batch."""

    exit_code = 17
    final = True
    status = "FAILED_PRECONDITION"


class StageError(OpdError):
    """A stage of a run of several jobs failed; finished stages are kept, and the run can be resumed."""

    exit_code = 18


class RolloutEngineError(OpdError):
    """The engine that samples the student's answers cannot be restored, or does not have the student's weights."""

    exit_code = 19


class RankLostError(OpdError):
    """Another rank of the run ended or did not come, and this one cannot continue without it."""

    exit_code = 21


class PluginError(OpdError):
    """A plug-in's class or results are not what its base class demands."""

    exit_code = 22
    final = True


class UndecidedTeacherError(IncompatibleTeacherError):
    """The replicas of a teacher differ and no side has a majority; during a change of weights, this may pass."""

    exit_code = 23
    final = False


class CancelledError(OpdError):
    """The caller left before the result was ready."""

    exit_code = 130
    status = "CANCELLED"


def short(found: object) -> str:
    """A plug-in's result for a message: its value if that is short, else its type."""
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
        message: the server's sentence, of which this keeps one line.
    """
    first: dict[str, type[OpdError]] = {}
    for cls in all_errors():
        if cls.status is not None:
            first.setdefault(cls.status, cls)
    return first.get(status, UnavailableError)(printable(message, lines=False))
