"""How calls end that are not answered: whether the caller has left, and what their errors hold."""

import grpc.aio


def has_left(error: BaseException) -> bool:
    """Whether a call failed because its caller has left or the server has cut it off, which is not an error.

    grpcio cancels the call's task when it learns of that; a read or write that fails before then raises one of these.
    """
    return isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError | grpc.aio.AbortError)


def release(error: BaseException) -> None:
    """Drop the tracebacks of an exception, and of those that it came from, once it has been dealt with.

    A traceback holds the frames of the call, with its request and its scores. Where a frame or a future holds the
    exception in turn, only a full garbage collection would free them, and a server may go for minutes without one.
    """
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
