"""Stop tokens of a teacher mapped onto the student's, against distributions written out."""

from typing import Any

import numpy as np
import pytest
import torch
from rows import make_row

import student.scoring.stops as stops_module
from opd.errors import ConfigError
from opd.heads import OutputHead
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from student.data.needs import TEACHER
from student.data.row import Row
from student.scoring.stops import StopMap, stop_log_ratios, teacher_stops

VOCAB = 9
MODEL = "teacher"


def distribution(positions: int = 5) -> np.ndarray:
    logits = np.random.default_rng(0).normal(0, 3, (positions, VOCAB))
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def moved(logp: np.ndarray, student: list[int], foreign: list[int]) -> np.ndarray:
    """T' by its definition."""
    p = np.exp(logp)
    mass = p[:, foreign].sum(-1) * (1 - np.exp(-10))
    p[:, foreign] *= np.exp(-10)
    p[:, student] += mass[:, None] / len(student)
    return np.asarray(np.log(p))


def item(response: list[int], gather: np.ndarray | None = None) -> ScoreItem:
    return ScoreItem(np.array([1, *response], np.uint32), 1, gather)


def answer(logp: np.ndarray, response: list[int], ids: np.ndarray) -> Scores:
    """What a server answers for `ids`."""
    taken = np.take_along_axis(logp, ids.astype(np.int64), -1)
    left = 1 - np.exp(taken).sum(-1)
    tail = np.log(np.maximum(left, 1e-300))
    sampled = logp[np.arange(len(response)), response]
    return Scores(sampled.astype(np.float32), taken.astype(np.float32), ids, tail.astype(np.float32))


def test_the_log_ratio_of_events_is_that_of_the_audit() -> None:
    """S(eot) = 0.6, T(eot) = 1e-11, T(im_end) = 0.2: -24.8176 as a token, -1.0986 as an event."""
    stops = StopMap([0], {MODEL: [1]})
    spec = PayloadSpec.sampled()
    asked, request = stops.ask(MODEL, spec, item([0]))
    assert asked.kind is PayloadKind.GATHER and request.gather_ids is not None
    given = Scores(np.log([1e-11]).astype(np.float32), np.log([[0.2]]).astype(np.float32), request.gather_ids)
    before = float(given.sampled[0]) - np.log(0.6)  # type: ignore[index]
    after = float(stops.apply(MODEL, spec, request, given).sampled[0]) - np.log(0.6)  # type: ignore[index]
    assert before == pytest.approx(-24.8176, abs=1e-3) and after == pytest.approx(-1.0986123, abs=1e-4)


@pytest.mark.parametrize(("student", "teacher"), [([0], [1]), ([0], [0, 1]), ([0, 4], [1, 2, 4]), ([3], [1, 2])])
def test_a_gather_answers_as_the_mapped_distribution_would(student: list[int], teacher: list[int]) -> None:
    logp, response = distribution(), [5, 1, 7, 4, 0]
    foreign = sorted(set(teacher) - set(student))
    ids = np.tile(np.array([6, *sorted({*student, *foreign})], np.uint32), (5, 1))
    stops = StopMap(student, {MODEL: teacher})
    assert set(stops.ids) == {*student, *foreign}
    spec = PayloadSpec.gather(ids.shape[1])
    found = stops.apply(MODEL, spec, item(response, ids), answer(logp, response, ids))
    expected = moved(logp, student, foreign)
    assert found.values is not None and found.sampled is not None and found.log_tail is not None
    np.testing.assert_allclose(found.values, np.take_along_axis(expected, ids.astype(int), -1), atol=1e-5)
    np.testing.assert_allclose(found.sampled, expected[np.arange(5), response], atol=1e-5)
    total = np.exp(found.values.astype(float)).sum(-1) + np.exp(found.log_tail.astype(float))
    np.testing.assert_allclose(total, 1.0, atol=1e-6)


def test_sampled_log_probs_are_those_of_the_mapped_distribution() -> None:
    logp, response, student, foreign = distribution(), [5, 1, 0, 2, 4], [0, 4], [1, 2]
    stops = StopMap(student, {MODEL: foreign})
    _, request = stops.ask(MODEL, PayloadSpec.sampled(), item(response))
    assert request.gather_ids is not None
    given = answer(logp, response, request.gather_ids)
    found = stops.apply(MODEL, PayloadSpec.sampled(), request, given)
    np.testing.assert_allclose(
        found.sampled,
        moved(logp, student, foreign)[np.arange(5), response],
        atol=1e-5,  # type: ignore[arg-type]
    )
    assert found.values is None and found.ids is None and found.log_tail is None


def test_a_top_k_names_the_students_stop_token_in_place_of_the_teachers() -> None:
    logp = np.log(np.array([[0.001, 0.7, 0.2, 0.05, 0.049], [0.3, 0.4, 0.2, 0.05, 0.05], [0.1, 0.01, 0.8, 0.05, 0.04]]))
    ids = np.array([[1, 2], [1, 0], [2, 0]], np.uint32)
    stops = StopMap([0], {MODEL: [1]})
    found = stops.apply(MODEL, PayloadSpec.topk(2), item([0, 0, 0]), answer(logp, [0, 0, 0], ids))
    assert found.ids is not None and found.values is not None and found.sampled is not None
    np.testing.assert_array_equal(found.ids, [[0, 2], [0, 1], [2, 0]])
    np.testing.assert_allclose(np.exp(found.values[0]), [0.7, 0.2], rtol=1e-4)
    np.testing.assert_allclose(np.exp(found.values[1]), [0.7, 0.4 * np.exp(-10)], rtol=1e-4)
    np.testing.assert_allclose(np.exp(found.values[2]), [0.8, 0.1], rtol=1e-6)
    np.testing.assert_allclose(np.exp(found.sampled), [0.701, 0.7, 0.1], rtol=1e-4)
    assert (np.diff(found.values.astype(float), axis=-1) <= 0).all()


def test_of_a_top_k_the_students_listed_stop_tokens_share_and_others_get_none() -> None:
    logp = np.log(np.array([[0.3, 0.4, 0.2, 0.06, 0.04]] * 3))
    ids = np.array([[1, 0], [1, 0], [1, 0]], np.uint32)
    found = StopMap([0, 3], {MODEL: [1]}).apply(
        MODEL, PayloadSpec.topk(2), item([3, 0, 2]), answer(logp, [3, 0, 2], ids)
    )
    assert found.values is not None and found.sampled is not None
    np.testing.assert_allclose(np.exp(found.values), [[0.7, 0.4 * np.exp(-10)]] * 3, rtol=1e-4)
    np.testing.assert_allclose(np.exp(found.sampled), [0.06, 0.7, 0.2], rtol=1e-4)
    both = np.array([[0, 3, 1]], np.uint32)
    found = StopMap([0, 3], {MODEL: [1]}).apply(MODEL, PayloadSpec.topk(3), item([3]), answer(logp[:1], [3], both))
    assert found.values is not None and found.sampled is not None
    np.testing.assert_allclose(np.exp(found.values), [[0.5, 0.26, 0.4 * np.exp(-10)]], rtol=1e-4)
    np.testing.assert_allclose(np.exp(found.sampled), [0.26], rtol=1e-4)


def test_models_that_end_as_the_student_does_are_left_alone() -> None:
    stops = StopMap([0, 1], {MODEL: [1], "other": [2]})
    spec, request = PayloadSpec.sampled(), item([0])
    scores = Scores(np.zeros(1, np.float32))
    for model in (MODEL, "in process"):
        assert stops.ask(model, spec, request) == (spec, request)
        assert stops.apply(model, spec, request, scores) is scores
    for rich in (PayloadSpec.topk(2), PayloadSpec.gather(2)):  # which hold the stop tokens, or are asked at them
        assert stops.ask("other", rich, request) == (rich, request)
    assert StopMap([0, 1], {MODEL: [1]}).ids == ()


def test_hidden_states_cannot_be_mapped() -> None:
    scores = Scores(hidden=np.zeros((1, 4), np.float32))
    with pytest.raises(ConfigError, match=r"map_stops .* payload hidden"):
        StopMap([0], {MODEL: [1]}).apply(MODEL, PayloadSpec.hidden(), item([0]), scores)


def ended(role: str = TEACHER, scores: Scores | None = None, **changes: Any) -> Row:
    row = make_row([3, 4, 2], behaviour=np.array([-9.0, -9.0, -0.5]), **changes)
    row.signals[role, PayloadKind.SAMPLED] = scores or Scores(np.array([-8.0, -8.0, -3.0], np.float32))
    return row


def no_head(role: str, row: Row) -> OutputHead:
    raise AssertionError("no hidden states, no head")


def test_the_stop_log_ratio_is_that_of_the_last_token_of_rows_that_ended_by_themselves() -> None:
    rows = [
        ended(),
        ended("teacher/b", turns=((0, 3),)),
        ended(truncated=True),
        ended(origin="expert"),
        ended(turns=((0, 1), (1, 3))),
        ended("reference"),
    ]
    observed = ended(turns=((0, 2),))  # the last token is the environment's
    observed.behaviour_logp[-1] = np.nan
    assert stop_log_ratios([*rows, observed], no_head, VOCAB, 1.0) == [-2.5, -2.5]


@pytest.mark.parametrize("halves", [False, True])
def test_of_hidden_states_the_last_are_projected_as_the_student_would(
    halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stops_module, "_ROWS", 2)  # so that three rows take two projections
    generator = torch.Generator().manual_seed(0)
    head = OutputHead(torch.randn(VOCAB + 2, 4, generator=generator), None)
    states, rows = torch.randn(3, 3, 4, generator=generator).bfloat16().float(), []
    for i, state in enumerate(states):
        sent = state.bfloat16().view(torch.uint16).numpy() if halves else state.numpy()
        rows.append(make_row([3, 4, i], behaviour=-1.0 - i))
        rows[-1].signals[TEACHER, PayloadKind.HIDDEN] = Scores(hidden=sent)
    logp = ((states[:, -1] @ head.weight.T)[:, :VOCAB] / 0.7).log_softmax(-1)
    expected = [float(logp[i, i]) + 1.0 + i for i in range(3)]
    assert stop_log_ratios(rows, lambda role, row: head, VOCAB, 0.7) == pytest.approx(expected, abs=1e-5)


def test_a_server_that_lists_no_stop_tokens_has_its_end_of_sequence() -> None:
    assert teacher_stops(pb.TeacherInfo(stop_token_ids=[4, 7])) == {4, 7}
    assert teacher_stops(pb.TeacherInfo(tokenizer=pb.TokenizerInfo(eos_id=3))) == {3}
    assert teacher_stops(pb.TeacherInfo(tokenizer=pb.TokenizerInfo(eos_id=-1))) == set()
