"""Rows with a given answer: read, not sampled."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow
from student.data.row import Row, RowKey
from student.rollout.recorded import read_answers
from student.rollout.transformers import RolloutSpec, rollout

SOLVED = [("1+1=", "02:2"), ("12+34=", "06 04:46"), ("7+7=", "14:14")]


def planned(text: str, answer: str | None, sample: int = 0, limit: int = 12, temperature: float = 1.0) -> PlannedRow:
    prompt = Prompt.make(text)
    return PlannedRow(RowKey(0, prompt.uid, sample), prompt, limit, temperature, answer)


def read(student: tuple[Any, Any], rows: list[PlannedRow], batch_rows: int = 64) -> list[Row]:
    model, tokenizer = student
    return rollout(model, tokenizer, rows, RolloutSpec(7, batch_rows, 4, len(tokenizer), 40))


def test_a_given_row_holds_the_answer_and_the_end_of_sequence(student: tuple[Any, Any]) -> None:
    (row,) = read(student, [planned("1+1=", "02:2")])
    assert row.origin == "expert" and row.text == "02:2" and not row.truncated
    assert row.response_ids[-1] == student[1].eos_token_id
    assert row.loss_mask.all() and row.length == 5


def test_a_given_row_is_cut_at_its_length_limit(student: tuple[Any, Any]) -> None:
    (row,) = read(student, [planned("1+1=", "02:2", limit=3)])
    assert row.truncated and row.text == "02:" and row.length == 3


@pytest.mark.parametrize(("answer", "end"), [("yes", 2), ("yes<|endoftext|>", 0), ("yes<|im_end|>", 2)])
def test_a_given_row_of_a_chat_ends_in_a_stop_token_of_the_model(chat_model: Path, answer: str, end: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(chat_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    prompt = Prompt.make([{"role": "user", "content": "well?"}])
    row = PlannedRow(RowKey(0, prompt.uid, 0), prompt, 12, 1.0, answer)
    (found,) = rollout(model, tokenizer, [row], RolloutSpec(7, 4, 0, len(tokenizer), 90, frozenset({0, 2})))
    assert found.response_ids.tolist() == [*tokenizer("yes", add_special_tokens=False)["input_ids"], end]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_candidates_are_those_of_a_forward_over_the_whole_row(
    student: tuple[Any, Any], temperature: float
) -> None:
    model, _ = student
    for row in read(student, [planned(*pair, temperature=temperature) for pair in SOLVED]):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, :, : len(student[1])].float() / temperature, -1)
        start = len(row.prompt_ids) - 1
        mine = logp[start : start + row.length]
        expected = mine.gather(-1, ids[0, start + 1 :, None]).squeeze(-1)
        np.testing.assert_allclose(row.behaviour_logp, expected.numpy(), atol=1e-4)
        assert row.candidates is not None
        best = mine.gather(-1, torch.from_numpy(row.candidates.astype(np.int64)))
        np.testing.assert_allclose(best.numpy(), mine.topk(4).values.numpy(), atol=1e-4)


def test_given_rows_leave_the_sampled_ones_as_they_were_and_the_order_too(student: tuple[Any, Any]) -> None:
    alone = read(student, [planned("12+34=", None, 0), planned("7+7=", None, 1)])
    mixed = read(student, [planned("12+34=", None, 0), planned("1+1=", "02:2"), planned("7+7=", None, 1)])
    assert [row.origin for row in mixed] == ["policy", "expert", "policy"]
    assert [row.response_ids.tolist() for row in mixed[::2]] == [row.response_ids.tolist() for row in alone]


def test_given_rows_do_not_depend_on_their_batch(student: tuple[Any, Any]) -> None:
    plan = [planned(*pair) for pair in SOLVED]
    for one, other in zip(read(student, plan), read(student, plan, batch_rows=1), strict=True):
        np.testing.assert_allclose(one.behaviour_logp, other.behaviour_logp, atol=1e-4)


def test_recorded_answers_are_found_by_their_prompt_in_order(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    lines = [{"prompt": "1+1=", "answer": "a"}, {"prompt": chat, "answer": "b"}, {"prompt": "1+1=", "answer": "c"}]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    answers = read_answers(path)
    assert answers[Prompt.make("1+1=", answer="2", domain="sums").content_hash] == ["a", "c"]
    assert answers[Prompt.make(chat).content_hash] == ["b"]


def test_a_byte_order_mark_is_no_part_of_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1+1=", "answer": "a"}\r\n')
    assert read_answers(path)[Prompt.make("1+1=").content_hash] == ["a"]


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": "x", "answer": "\\ud800"}', '{"prompt": "x"}', "[]", '{"prompt": 5, "answer": "x"}']
)
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "x", "answer": "y"}\n' + line)
    with pytest.raises(DataError, match="line 2"):
        read_answers(path)
    with pytest.raises(DataError, match="missing"):
        read_answers(tmp_path / "missing.jsonl")
