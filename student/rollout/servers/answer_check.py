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
_MOST_MASS, _MOST_GAP = 1.1, 0.1
"""Wide enough for probabilities and log-probs (nats) in half precision."""


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
        return
    if ask.top:
        yield from _problems_of_top(answer, ids, logp, valid, ask.top)


def _problems_of_top(answer: Answer, ids: NDArray[Any], logp: NDArray[Any], valid: int, count: int) -> Iterator[str]:
    top, of_top = _numbers(answer.top, "iu"), _numbers(answer.top_logp, "iuf")
    if top is None or top.shape != (len(ids), count) or not ((top >= 0) & (top < valid)).all():
        yield f"does not have {count} likely ids below {valid} at each position"
        return
    if not np.diff(np.sort(top)).all():
        yield "lists a likely id twice"
    if of_top is None or of_top.shape != top.shape or not (of_top <= _MOST_LOGP).all():
        yield "does not have a log-prob of at most 0 for each likely id"
        return
    sampled = top == ids[:, None]
    others = np.where(sampled, 0.0, np.exp(of_top)).sum(-1)
    if not (others + np.exp(logp) <= _MOST_MASS).all():
        yield "has probabilities that add up to more than 1"
    if (np.abs(of_top - logp[:, None])[sampled] > _MOST_GAP).any():
        yield "gives a token two log-probs"


def _numbers(values: Any, kinds: str) -> NDArray[Any] | None:
    """The values as an array if all are numbers of the given NumPy kinds; otherwise None."""
    try:
        found = np.array(values)
    except (ValueError, OverflowError):
        return None
    return found if found.dtype.kind in kinds else None
