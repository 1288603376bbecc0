"""Rows of several windows: each part is read after what the student had seen, and the row stays one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rows import make_row

from opd.wire.spans import put_back
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from student.data.batch import collate, split
from student.data.row import EpisodeTrace, Row
from student.data.states import row_from_state, row_to_state
from student.methods.windows.probe import cut_row
from student.model.ranks import Ranks
from student.scoring.local import LocalModels
from student.settings.teachers import EmaSettings

WINDOWS = ((0, 0, 3), (2, 4, 6), (5, 7, 10))
OWN = [0, 1, 2, 4, 5, 7, 8, 9]


def windowed(row: Row) -> Row:
    """A row of ten tokens, of which the student wrote eight, in three windows."""
    own = np.isin(np.arange(10), OWN)
    cut = replace(cut_row(row, 10), episode=EpisodeTrace(~own, WINDOWS), loss_mask=own, signals={})
    return replace(cut, turns=tuple((start, end) for _, start, end in WINDOWS))


def sequences(row: Row) -> list[ScoreItem]:
    """What a model must read for each window, written out."""
    return [
        ScoreItem(np.concatenate([row.prompt_ids, row.response_ids[since:end]]), len(row.prompt_ids))
        for since, _, end in WINDOWS
    ]


@pytest.fixture
def long_rows() -> Callable[[Any], list[Row]]:
    def made(one: Any) -> list[Row]:
        found = [row for row in one.rows(samples=6) if row.length >= 10]
        assert len(found) > 2
        return found

    return made


@pytest.fixture
def local() -> Callable[[Any], LocalModels]:
    def made(one: Any) -> LocalModels:
        learner, device = one.learner, one.learner.accelerator.device
        size = len(one.tokenizer)
        models = LocalModels(
            learner.student, Ranks(), learner.settings, EmaSettings(), device, valid_vocab=size, temperature=1.0
        )
        models.kept.start(["student"])
        return models

    return made


def test_a_row_asks_for_its_own_tokens_once_each_in_the_window_that_they_were_written_in() -> None:
    row = windowed(make_row(np.arange(10, 20), candidates=np.arange(20, dtype=np.uint32).reshape(10, 2)))
    asked = row.asked(gather=True, own=True)
    assert [first for _, first in asked] == [0, 2, 5]
    assert [item.token_ids.tolist() for item, _ in asked] == [item.token_ids.tolist() for item in sequences(row)]
    places = [first + item.pick(np.arange(item.response_length)) for item, first in asked]
    assert np.concatenate(places).tolist() == OWN
    for (item, _), place in zip(asked, places, strict=True):
        assert row.candidates is not None and (item.gather_ids == row.candidates[place]).all()
        assert (item.scored_ids == row.response_ids[place]).all()
    back = put_back([(Scores(sampled=p.astype(np.float32)), i, f) for p, (i, f) in zip(places, asked, strict=True)], 10)
    assert back.sampled is not None and back.sampled[OWN].tolist() == OWN and back.unasked == 2


def test_what_was_read_before_a_token_is_that_of_its_window() -> None:
    row = windowed(make_row(np.arange(10, 20), prompt_ids=np.array([1], np.uint32)))
    assert row.read_before(0).tolist() == [1]
    assert row.read_before(5).tolist() == [1, 12, 13, 14]
    assert row.read_before(9).tolist() == [1, 15, 16, 17, 18]
    assert row.positions == 4 + 5 + 6 and row.longest == 6
    assert replace(row, episode=None).read_before(9).tolist() == [1, *range(10, 19)]


def test_the_student_scores_and_learns_each_window_as_a_sequence_of_its_own(
    bench: Callable[..., Any], long_rows: Callable[[Any], list[Row]], local: Callable[[Any], LocalModels]
) -> None:
    one = bench({"name": "opd", "payload": "sampled"}, micro_batch_tokens=100_000)
    rows = [windowed(row) for row in long_rows(one)]
    models = local(one)
    found = models.score("student", rows)
    micro = collate(rows, range(len(rows)), torch.device("cpu"))
    assert len(micro.input_ids) == 3 * len(rows) and micro.row.max() == len(rows) - 1
    hidden = one.learner.student(micro.input_ids, micro.attention_mask, micro.sequence, micro.source)
    logits = one.learner.student.head().logits(hidden)[:, : len(one.tokenizer)]
    trained = logits.log_softmax(-1).gather(-1, micro.token_ids[:, None])[:, 0].detach().numpy()
    for index, row in enumerate(rows):
        alone = models.score("student", sequences(row))
        for (since, start, end), scores in zip(WINDOWS, alone, strict=True):
            assert scores.sampled is not None and found[index].sampled is not None
            np.testing.assert_allclose(found[index].sampled[start:end], scores.sampled[start - since :], atol=1e-5)
            mine = trained[10 * index :][:10][start:end]
            np.testing.assert_allclose(mine, scores.sampled[start - since :], atol=1e-5)
    for payload in (PayloadSpec.topk(3, "f32"), PayloadSpec.gather(2, "f32"), PayloadSpec.hidden("f32")):
        with_ids = [replace(row, candidates=np.tile(np.arange(2, dtype=np.uint32), (10, 1))) for row in rows]
        whole = models.score("student", with_ids, payload)
        assert all(len(a) == 10 for s in whole for a in (s.values, s.hidden, s.log_tail) if a is not None)


def test_the_gradient_of_windows_does_not_depend_on_micro_batches(
    bench: Callable[..., Any], long_rows: Callable[[Any], list[Row]]
) -> None:
    found = []
    for size in (1, 100_000):
        one = bench({"name": "opd", "payload": "sampled"}, micro_batch_tokens=size)
        rows = [windowed(row) for row in long_rows(one)]
        for row in rows:
            parts = row.asked(gather=False, own=True)
            spec = PayloadSpec.sampled()
            scores = one.engine.score([one.item(item, spec, 1.0) for item, _ in parts])
            row.signals["teacher", spec.kind] = put_back(
                [(s, item, first) for s, (item, first) in zip(scores, parts, strict=True)], row.length
            )
        found.append(one.gradient(rows))
    assert any(gradient.abs().max() > 0 for gradient in found[0].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_micro_batches_count_every_sequence_of_a_row() -> None:
    plain, cut = make_row(10), windowed(make_row(10))
    assert split([plain, plain, plain], 36, turn=None) == [[0, 1, 2]]
    assert split([cut, cut, cut], 42, turn=None) == [[0, 1], [2]]  # two rows are six sequences of up to seven tokens


def test_windows_survive_a_checkpoint_and_a_cut() -> None:
    row = windowed(make_row(10))
    assert row_from_state(row_to_state(row)).windows == WINDOWS
    assert cut_row(row, 5).windows == ((0, 0, 3), (2, 4, 5))
