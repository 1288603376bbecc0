"""What is asked about a row is a function of the row, and the answers give its signals back."""

from copy import deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from rows import make_row

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from student.data.needs import REFERENCE, STUDENT, TEACHER, Needs, SignalNeed
from student.data.row import EpisodeTrace, Row
from student.scoring.requests import Requests
from student.scoring.stops import StopMap
from student.settings.teachers import TeacherSettings

SAMPLED, GATHER = PayloadSpec.sampled(), PayloadSpec.gather(3, "f32")
TOOLS = np.array([False, False, True, True, False, False])
EPISODE = {
    "episode": EpisodeTrace(TOOLS),
    "loss_mask": np.array([True, True, False, False, True, True]),
    "turns": ((0, 2), (4, 6)),
}


def requests(*roles: str, spec: PayloadSpec = GATHER, stops: StopMap | None = None, **settings: Any) -> Requests:
    needs = Needs(signals=tuple(SignalNeed(role, spec) for role in roles))
    group = TeacherSettings(**({"default": "a", "reference": "b"} | settings))
    return Requests(group, needs, ["a", "b"], stops=stops)


def row(**fields: Any) -> Row:
    ids = np.arange(10, 16, dtype=np.uint32)
    return make_row(ids, candidates=np.stack([ids, ids + 1, ids + 2], axis=1), **fields)


def log_probs(model: str, ids: np.ndarray) -> np.ndarray:
    """What a model would say, by id alone; the tail takes what is left."""
    return (-2.0 - 0.01 * ids - (0.5 if model == "b" else 0.0)).astype(np.float32)


def answer(model: str, spec: PayloadSpec, item: ScoreItem) -> Scores:
    at_tokens = log_probs(model, item.scored_ids)
    if spec.kind is PayloadKind.SAMPLED or item.gather_ids is None:
        return Scores(sampled=at_tokens, wire_bytes=4)
    values = log_probs(model, item.gather_ids)
    tail = np.log1p(-np.exp(values).sum(-1)).astype(np.float32)
    return Scores(sampled=at_tokens, values=values, ids=item.gather_ids, log_tail=tail, wire_bytes=4)


def signals(asked: Requests, of: Row) -> dict[Any, Scores]:
    return asked.signals(of, [(call, answer(call.target.model, call.spec, call.item)) for call in asked.of(of)])


@pytest.mark.parametrize(
    "fields", [{}, EPISODE, {**EPISODE, "episode": EpisodeTrace(TOOLS, windows=((0, 0, 2), (4, 4, 6)))}]
)
def test_answers_become_signals_at_every_position_that_was_asked_about(fields: dict[str, Any]) -> None:
    mine = row(**fields)
    found = signals(requests(TEACHER, REFERENCE), mine)
    assert set(found) == {(TEACHER, PayloadKind.GATHER), (REFERENCE, PayloadKind.GATHER)}
    own = mine.loss_mask
    for role, model in ((TEACHER, "a"), (REFERENCE, "b")):
        scores = found[role, PayloadKind.GATHER]
        assert scores.sampled is not None and scores.values is not None and scores.ids is not None
        np.testing.assert_array_equal(scores.sampled[own], log_probs(model, mine.response_ids)[own])
        np.testing.assert_array_equal(scores.values[own], log_probs(model, mine.candidates)[own])  # type: ignore[arg-type]
        np.testing.assert_array_equal(scores.ids, mine.candidates)
        assert scores.unasked == int((~own).sum())


def test_asking_changes_no_row_and_asks_the_same_again() -> None:
    mine = row(**EPISODE)
    before = deepcopy(mine)
    first, second = (requests(TEACHER, STUDENT).of(mine) for _ in range(2))
    np.testing.assert_equal(asdict(mine), asdict(before))
    assert [(c.target, c.reads, c.spec, c.first) for c in first] == [
        (c.target, c.reads, c.spec, c.first) for c in second
    ]
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.item.token_ids, other.item.token_ids)
    # A served teacher is not asked about what the environment wrote; a model in this process reads everything.
    assert [(c.target.local, c.item.scored_length) for c in first] == [(False, 4), (True, 6)]


def test_a_model_reads_its_own_context_and_the_signal_stays_aligned_with_the_response() -> None:
    mine = row(contexts={"a": np.full(7, 5, np.uint32)})
    (call,) = requests(TEACHER, spec=SAMPLED).of(mine)
    assert call.reads == "a" and call.item.prompt_length == 7
    np.testing.assert_array_equal(call.item.response_ids, mine.response_ids)
    assert requests(TEACHER, spec=SAMPLED).positions([mine]) == {TEACHER: 13}


def test_weighted_teachers_give_one_signal_or_one_each_where_divergences_are_summed() -> None:
    weights = {"a": 3.0, "b": 1.0}
    mixed = signals(requests(TEACHER, default=weights), row())
    assert set(mixed) == {(TEACHER, PayloadKind.GATHER)}
    one, two = (np.exp(log_probs(model, row().response_ids).astype(np.float64)) for model in "ab")
    sampled = mixed[TEACHER, PayloadKind.GATHER].sampled
    assert sampled is not None
    np.testing.assert_allclose(sampled, np.log(0.75 * one + 0.25 * two), atol=1e-6)
    each = signals(requests(TEACHER, default=weights, combine="divergence"), row())
    assert {role for role, _ in each} == {"teacher/a", "teacher/b"}


def test_mapped_stop_tokens_are_asked_for_and_do_not_stay_in_the_signal() -> None:
    asked = requests(TEACHER, spec=SAMPLED, stops=StopMap([15], {"a": [15, 99]}))
    (call,) = asked.of(row())
    assert call.spec.kind is PayloadKind.GATHER and call.item.gather_ids is not None
    scores = signals(asked, row())[TEACHER, PayloadKind.SAMPLED]
    assert scores.values is None and scores.sampled is not None
    plain = log_probs("a", row().response_ids)
    np.testing.assert_array_equal(scores.sampled[:-1], plain[:-1])
    assert scores.sampled[-1] > plain[-1]  # the stop token takes the mass of the teacher's other one


def test_a_prompt_that_goes_to_an_unchecked_teacher_is_refused() -> None:
    needs = Needs(signals=(SignalNeed(TEACHER, SAMPLED),))
    asked = Requests(TeacherSettings(default="a"), needs, ["a", "b"], known=["a"])
    other = Prompt.make("x", teacher="b")
    with pytest.raises(ConfigError, match=r"'b'.*teachers\.routes"):
        asked.of(row(prompt=other))
