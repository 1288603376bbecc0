"""Scores in one call, for notebooks and scripts: connect, score, disconnect."""

from collections.abc import Mapping, Sequence
from itertools import starmap

import numpy as np

from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from opd.wire.types import PayloadSpec, ScoreItem, Scores


def score(
    endpoints: str | Sequence[str] | Mapping[str, Sequence[str]],
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    payload: PayloadSpec | None = None,
    *,
    teacher: str | None = None,
) -> list[Scores]:
    """A teacher's scores of every response token in `rows`.

    A training loop should keep a `TeacherFleet` open instead, because every connection has to find and check its
    servers first.

    Args:
        endpoints: the servers, in any form that `TeacherFleet.connect` takes.
        rows: for each row (ids of the prompt, ids of the response); neither may be empty.
        payload: what to ask for; None for the log-probs of the response tokens.
        teacher: the teacher's name; may be left out if the servers have a single teacher.

    Returns:
        Scores in the order of `rows`, with log-probs in nats over the full vocabulary.

    Raises:
        ConfigError: if `teacher` is left out and there are several.
        OpdError: if no server answers or the request cannot be served.
    """
    with TeacherFleet.connect(endpoints, client="library") as fleet:
        names = sorted(fleet.teachers())
        if teacher is None and len(names) != 1:
            raise ConfigError(f"the servers serve the teachers {', '.join(names)}; name one of them.")
        return fleet.score(teacher or names[0], list(starmap(_item, rows)), payload or PayloadSpec.sampled())


def _item(prompt: Sequence[int], response: Sequence[int]) -> ScoreItem:
    return ScoreItem(np.array([*prompt, *response], dtype=np.uint32), len(prompt))
