"""CURE: which answers are sampled from the start, where the others continue them, and what is judged of those."""

import numpy as np
import pytest
from rows import make_row
from thread_ranks import build, metrics_of, of, together

from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, Scores
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.needs import STUDENT
from student.data.plan import PlannedRow
from student.data.row import Row, RowKey
from student.rollout.requests import Request, RolloutSpec

LENGTH = 8


def answer(planned: PlannedRow) -> Row:
    """Eight tokens with the prefix; the entropy is high at places 3 and 6, and highest at the first."""
    given = len(planned.prefix_ids)
    ids = np.array([*planned.prefix_ids, *(10 * planned.key.sample + np.arange(LENGTH - given))], np.uint32)
    row = make_row(ids, key=planned.key, prompt=planned.prompt)
    row.loss_mask[:given] = False
    p = np.full(LENGTH, 0.99)
    p[[0, 3, 6]] = 0.5, 0.6, 0.7
    values = np.log(np.stack([p, 1 - p], axis=1)).astype(np.float32)
    row.signals[STUDENT, PayloadKind.GATHER] = Scores(values=values)
    return row


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_first_answer_is_continued_from_its_most_uncertain_tokens(ranks: int) -> None:
    parts = together(ranks, lambda: build("cure", top=2, branches=3), answer, plan=of(8), groups=3)
    rows = [row for part, _, _ in parts for row in part]
    assert len(rows) == 24
    cuts = set()
    for uid in {row.key.uid for row in rows}:
        mine = sorted((row for row in rows if row.key.uid == uid), key=lambda row: row.key.sample)
        assert [row.key.parent for row in mine] == [-1, 0, 0, 0, -1, 4, 4, 4]
        for row in mine:
            cut = int((~row.loss_mask).sum())
            if row.key.parent >= 0:
                cuts.add(cut)
                assert row.response_ids[:cut].tolist() == mine[row.key.parent].response_ids[:cut].tolist()
    assert cuts == {3, 6}  # never before the first token
    found = metrics_of(parts[0][1])
    assert found["cure/branched_share"] == 1.0 and 3 / 8 < found["cure/kept"] < 6 / 8
    low, high = (-(p * np.log(p) + (1 - p) * np.log(1 - p)) for p in (0.7, 0.6))
    assert low < found["cure/cut_entropy"] < high


def test_an_answer_of_one_token_is_not_branched() -> None:
    def short(planned: PlannedRow) -> Row:
        row = make_row(1, key=planned.key, prompt=planned.prompt)
        row.signals[STUDENT, PayloadKind.GATHER] = Scores(values=np.log([[0.5, 0.5]]).astype(np.float32))
        return row

    ((rows, sampling, _),) = together(1, lambda: build("cure"), short, plan=of(4), groups=2)
    assert len(rows) == 8 and all(row.key.parent == -1 for row in rows)
    assert metrics_of(sampling)["cure/branched_share"] == 0.0


def test_what_a_branch_took_over_is_judged_with_it_and_a_given_beginning_is_not() -> None:
    tokenizer = make_tokenizer()
    prefix, rest = (tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("12", "34"))
    for parent, text in ((5, "1234"), (-1, "34")):
        planned = PlannedRow(RowKey(0, "u", 6, parent=parent), Prompt.make("1+1="), 4, 1.0, prefix_ids=prefix)
        request = Request(planned, tokenizer, RolloutSpec(0, 1, 0, len(tokenizer), 32), ("rollout",))
        for token in rest:
            request.take(token, -1.0, None)
        assert request.row(0).text == text
