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
    """A teacher's scores of every response token of `rows`.

    A training loop keeps a `TeacherFleet` open instead: each connection has to find and check its servers first.

    Args:
        endpoints: of the servers, as `TeacherFleet.connect` takes them.
        rows: (ids of the prompt, ids of the response) each; neither may be empty.
        payload: what is asked; the log-probs of the response tokens when None.
        teacher: its name; may be left out where the servers have one teacher.

    Returns:
        Scores in the order of `rows`, log-probs in nats over the full vocabulary.

    Raises:
        ConfigError: when `teacher` is left out and there are several.
        OpdError: when no server answers or the request cannot be served.
    """
    with TeacherFleet.connect(endpoints, client="library") as fleet:
        names = sorted(fleet.teachers())
        if teacher is None and len(names) != 1:
            raise ConfigError(f"the servers have the teachers {', '.join(names)}; name one of them.")
        return fleet.score(teacher or names[0], list(starmap(_item, rows)), payload or PayloadSpec.sampled())


def _item(prompt: Sequence[int], response: Sequence[int]) -> ScoreItem:
    return ScoreItem(np.array([*prompt, *response], dtype=np.uint32), len(prompt))
