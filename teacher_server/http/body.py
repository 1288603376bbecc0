"""Bodies of requests: read within a bound, parsed within bounds on what they become, and arrays of ids from them.

JSON is parsed on the event loop, one body at a time, so that the objects of several bodies are never in memory at once.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from opd.errors import InvalidRequestError
from opd.strict_json import read_json
from opd.wire.bounds import RequestBounds

MOST_LISTS_BESIDE = 1024
MOST_OTHERS = 4096
"""Most objects, and most quotes, in a body. An object of two characters becomes one of 64 bytes."""


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request.

    Args:
        request: the request, of which only the head has been read.
        most: largest size in bytes.

    Raises:
        InvalidRequestError: if it is larger, as soon as that is known, or compressed.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise InvalidRequestError(
            f"content-encoding is {encoding[:40]!r}, but bodies are read as they are; leave it out."
        )
    declared = request.headers.get("content-length", "0")
    body = bytearray()
    if not declared.isdecimal() or len(declared) > 18 or int(declared) > most:
        raise InvalidRequestError(
            f"content-length is {declared[:40]}, but at most {most} bytes are allowed; send fewer sequences at once."
        )
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise InvalidRequestError(f"the body has more than {most} bytes; send fewer sequences at once.")
    return bytes(body)


def parse_body(body: bytes, most_lists: int) -> dict[str, Any]:
    """The JSON object of a body.

    Args:
        body: the body, of a bounded size.
        most_lists: most lists that it may hold beside a few.

    Raises:
        InvalidRequestError: if it is not a JSON object, or holds more than any request does.
    """
    if body.count(b"[") > most_lists + MOST_LISTS_BESIDE or body.count(b"{") + body.count(b'"') > MOST_OTHERS:
        raise InvalidRequestError("the body has more lists, objects or strings than any request of this route needs.")
    try:
        found = read_json(body.decode("utf-8"))
    except ValueError as error:  # also for text that is not UTF-8, and for numbers of 5,000 digits
        raise InvalidRequestError(f"the body is not valid JSON ({type(error).__name__}); correct it.") from None
    if not isinstance(found, dict):
        raise InvalidRequestError(f"the body is a JSON {type(found).__name__}, but it must be an object.")
    return found


def whole_number(fields: Mapping[str, Any], name: str, default: int | None, least: int = 0) -> int | None:
    """A whole number of a request; `default` if it is missing or null.

    Raises:
        InvalidRequestError: if it is something else, below `least`, or beyond 32 bits.
    """
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value < 2**31:
        raise InvalidRequestError(f"{name} is {_shown(value)}, but it must be a whole number of at least {least}.")
    return value


def require(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...], instead: str) -> None:
    """Refuse a value that asks for what this server does not do; a missing or null field asks for nothing.

    Raises:
        InvalidRequestError: naming the field, the value and what to use.
    """
    value = fields.get(name)
    if value is not None and value not in allowed:
        raise InvalidRequestError(f"{name} is {_shown(value)}, but {instead}.")


def nothing_generated(fields: Mapping[str, Any], name: str) -> None:
    """Refuse a request for generated tokens: `name` is the field with their number, of which 0 and 1 ask for none.

    Raises:
        InvalidRequestError: if it is another number, or missing, which servers that generate take for one.
    """
    value = fields.get(name)
    if type(value) is not int or value not in (0, 1):
        raise InvalidRequestError(
            f"{name} is {_shown(value)}, but this server scores the given tokens and generates none; set it to 0 or 1."
        )


def sequences(value: Any) -> tuple[bool, list[Any]]:
    """Whether a request has a list of sequences, and the sequences: a list of lists is one, else there is one."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return True, value
    return False, [value]


def token_row(value: Any, name: str) -> NDArray[np.uint32]:
    """A sequence of token ids as an array [P + T].

    Raises:
        InvalidRequestError: if it is not a list of ids.
    """
    if not isinstance(value, list) or len(value) < 2:
        raise InvalidRequestError(
            f"{name} is {_shown(value)}, but it must be a list of at least two token ids: texts are not tokenized here."
        )
    return _ids(value, name, least=0).astype(np.uint32)


def id_rows(value: Any, rows: int, name: str, bounds: RequestBounds) -> NDArray[np.int64]:
    """Lists of ids as an array [rows, K]; shorter lists are filled up with -1, which stands for no id.

    Raises:
        InvalidRequestError: if they are not `rows` lists of ids, or become too large.
    """
    if not isinstance(value, list) or len(value) != rows or set(map(type, value)) != {list}:
        count = len(value) if isinstance(value, list) else _shown(value)
        raise InvalidRequestError(f"{name} has {count} rows, but these tokens and this start need {rows} lists of ids.")
    lengths = np.fromiter(map(len, value), np.int64, rows)
    width = int(lengths.max())
    if width == 0:
        raise InvalidRequestError(f"{name} names no id; leave it out.")
    check_size(rows, width, name, bounds)
    out = np.full((rows, width), -1, np.int64)
    out[np.arange(width) < lengths[:, None]] = _ids(list(chain.from_iterable(value)), name, least=-1)
    return out


def check_size(rows: int, width: int, name: str, bounds: RequestBounds) -> None:
    """Raise InvalidRequestError if ids of this shape are more than a request may hold."""
    if 4 * rows * width > bounds.max_request_bytes:
        raise InvalidRequestError(
            f"{name} asks for {width} ids at each of {rows} positions, more than the {bounds.max_request_bytes} bytes "
            "of a request; send fewer sequences at once, or start later."
        )


def _ids(value: list[Any], name: str, least: int) -> NDArray[np.int64]:
    if set(map(type, value)) != {int}:
        raise InvalidRequestError(f"{name} must hold token ids only, which are whole numbers.")
    try:
        found = np.array(value, np.int64)
    except OverflowError:
        raise InvalidRequestError(f"{name} holds a number beyond 64 bits; token ids are below 2^32.") from None
    if int(found.min()) < least or int(found.max()) >= 2**32:
        wrong = int(found.min()) if int(found.min()) < least else int(found.max())
        raise InvalidRequestError(f"{name} holds {wrong}, but token ids are from {least} to 2^32 - 1.")
    return found


def distinct(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.uint32]:
    """[N, K] ids with each -1 replaced by an id that its row does not hold, since teachers score distinct ids.

    Raises:
        InvalidRequestError: if K is larger than the vocabulary.
    """
    missing = ids < 0
    if ids.shape[1] > vocab_size:
        raise InvalidRequestError(f"a position has {ids.shape[1]} ids, but the vocabulary has {vocab_size}.")
    if missing.any():
        # Of the first 2 K ids at least K are free in every row.
        first = min(2 * ids.shape[1], vocab_size)
        taken = np.zeros((len(ids), first + 1), bool)  # the last column collects the ids beyond
        np.put_along_axis(taken, np.where((ids < 0) | (ids > first), first, ids), True, axis=1)
        free = np.argsort(taken[:, :first], axis=1, kind="stable")
        ids = np.where(missing, np.take_along_axis(free, np.maximum(np.cumsum(missing, 1) - 1, 0), 1), ids)
    return ids.astype(np.uint32)


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value) if not isinstance(value, list | dict) else ""
    return text if 0 < len(text) <= 40 else f"a {type(value).__name__}"
