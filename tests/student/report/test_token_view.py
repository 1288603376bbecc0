"""Token by token: exact divergences, the teacher's preferences, and what is unknown stays unknown."""

import numpy as np
import pytest
import torch
from rows import make_row

from opd.heads import OutputHead
from opd.wire.types import PayloadKind, Scores
from student.data.needs import TEACHER
from student.data.row import Row
from student.data.token_batch import SignalTokens, StudentTokens, TokenBatch
from student.report.token_view import pieces, view_of_batch, view_of_row

VOCABULARY, TOKENS = 7, 40


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "abcdefg"[ids[0]]


def response() -> Row:
    return make_row([0, 1, 2], prompt="1+1=", text="abc")


def batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    student, teacher, head = (torch.randn(n, 4, generator=generator) for n in (TOKENS, TOKENS, VOCABULARY + 2))
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[3] = False
    return TokenBatch(
        token_ids=torch.arange(TOKENS) % VOCABULARY,
        mask=mask,
        weights=mask.float(),
        row=torch.zeros(TOKENS, dtype=torch.int64),
        position=torch.arange(TOKENS),
        behaviour_logp=torch.zeros(TOKENS),
        candidates=None,
        student=StudentTokens(hidden=student, head=OutputHead(head)),
        signals={(TEACHER, PayloadKind.HIDDEN): SignalTokens(hidden=teacher, head=OutputHead(head))},
        rows=(),
        valid_vocab=VOCABULARY,
        temperature=0.7,
    )


def test_the_divergence_of_a_token_is_that_of_whole_distributions() -> None:
    given = batch()
    head, hidden = given.student.head, given.student.hidden
    assert head is not None and hidden is not None
    teacher = given.signals[TEACHER, PayloadKind.HIDDEN].hidden
    assert teacher is not None
    ours, theirs = ((h @ head.weight.T)[:, :VOCABULARY].div(0.7).log_softmax(-1) for h in (hidden, teacher))
    expected = torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none").sum(-1)
    view = view_of_batch(given)
    assert [value for value, _ in view if value is not None] == pytest.approx(expected[given.mask].tolist(), abs=1e-5)
    assert view[3] == (None, [])  # what a teacher says there is a placeholder where it was not asked
    best, probability = view[0][1][0]
    assert best == int(theirs[0].argmax()) and probability == pytest.approx(float(theirs[0].max().exp()), abs=1e-6)


def test_a_row_shows_log_ratios_and_the_likeliest_of_the_gathered_ids() -> None:
    row = response()
    row.behaviour_logp = np.array([-1.0, -2.0, np.nan], dtype=np.float32)
    values = np.log(np.array([[0.1, 0.6, 0.2, 0.05]] * 3, dtype=np.float16))
    ids = np.array([[0, 1, 2, 3]] * 3, dtype=np.uint32)
    row.signals = {(TEACHER, PayloadKind.GATHER): Scores(np.full(3, -1.5, np.float32), values, ids)}
    measure, view = view_of_row(row)
    shown = list(pieces([0, 1, 2], view, Letters()))
    assert measure == "log_ratio"
    assert [piece[:2] for piece in shown] == [["a", 0.5], ["b", -0.5], ["c", None]]
    assert [name for name, _ in shown[0][2]] == ["b", "c", "a"]
    assert shown[0][2][0][1] == pytest.approx(0.6, abs=1e-3)


def test_a_row_without_scores_has_no_view() -> None:
    assert view_of_row(response()) == ("log_ratio", [])
