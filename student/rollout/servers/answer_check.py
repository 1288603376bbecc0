"""Checks each sampled row where it arrives, for all kinds of server: whether it can be the answer to what was asked."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from student.rollout.servers.dialect import Answer, Ask

_MOST_LOGP = 1e-3
"""Log-probs computed in half precision may be slightly above 0."""
_LEAST_LOGP = -1000.0
"""No sampler draws a token of a lower log-prob, in nats; servers send -9999 for minus infinity."""


def problem_of(answer: Answer, ask: Ask) -> str:
    """A clause saying why a row cannot be right, for example "ends before its limit"; "" if it can."""
    return next(_problems(answer, ask), "")


def _problems(answer: Answer, ask: Ask) -> Iterator[str]:
    valid, length = ask.barred.start, len(answer.ids)
    if not 1 <= length <= ask.limit:
        yield f"has {length} tokens, but 1 to {ask.limit} were asked for"
    ids, logp = _numbers(answer.ids, "iu"), _numbers(answer.logp, "iuf")
    if ids is None or ids.shape != (length,) or not ((ids >= 0) & (ids < valid)).all():
        yield f"has a token that is not an id below {valid}"
        return  # the rest reads the ids
    ends = np.isin(ids, ask.stops)
    if ends[:-1].any():
        yield "continues after a stop token"
    if not ends[-1] and len(ids) < ask.limit:
        yield f"ends after {len(ids)} of {ask.limit} tokens at a token that is not one of its stop tokens"
    # Compared this way round, so that NaN fails too.
    if logp is None or logp.shape != ids.shape or not ((logp >= _LEAST_LOGP) & (logp <= _MOST_LOGP)).all():
        yield f"has log-probs that are not one number from {_LEAST_LOGP:g} to 0 for each token"
    if ask.top:
        top = _numbers(answer.top, "iu")
        if top is None or top.shape != (len(ids), ask.top) or not ((top >= 0) & (top < valid)).all():
            yield f"does not have {ask.top} likely ids below {valid} at each position"
        elif not np.diff(np.sort(top)).all():
            yield "lists a likely id twice"


def _numbers(values: Any, kinds: str) -> NDArray[Any] | None:
    """The values as an array if all are numbers of the given NumPy kinds; otherwise None."""
    try:
        found = np.array(values)
    except (ValueError, OverflowError):
        return None
    return found if found.dtype.kind in kinds else None
