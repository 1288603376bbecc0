import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import DataError, NonFiniteError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row, RowKey
from student.rollout.draw import draw
from student.rollout.transformers import RolloutSpec, rollout


def sample(student: tuple[Any, Any], prompts: list[str], *, batch_rows: int = 64, **changes: Any) -> dict[Any, Row]:
    model, tokenizer = student
    spec = RolloutSpec(seed=7, batch_rows=batch_rows, candidates=4, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    made = [Prompt.make(text) for text in prompts]
    plan = plan_step(2, made, samples=3, max_new_tokens=12, temperature=changes.get("temperature", 1.0))
    return {(r.key.uid, r.key.sample): r for r in rollout(model, tokenizer, plan.rows, spec)}


PROMPTS = ["1+1=", "12+34=", "7+7=", "99+1="]


def test_a_rollout_does_not_depend_on_batching_or_order(student: tuple[Any, Any]) -> None:
    together = sample(student, PROMPTS)
    alone = sample(student, PROMPTS, batch_rows=1)
    shuffled = sample(student, PROMPTS[::-1], batch_rows=5)
    for key, row in together.items():
        for other in (alone[key], shuffled[key]):
            assert row.response_ids.tolist() == other.response_ids.tolist()
            np.testing.assert_allclose(row.behaviour_logp, other.behaviour_logp, atol=1e-4)


def test_behaviour_log_probs_equal_those_of_a_forward_over_the_whole_row(student: tuple[Any, Any]) -> None:
    model, _ = student
    for row in sample(student, PROMPTS).values():
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0].float(), -1)
        start = len(row.prompt_ids) - 1
        expected = logp[start : start + row.length].gather(-1, ids[0, start + 1 :, None]).squeeze(-1)
        np.testing.assert_allclose(row.behaviour_logp, expected.numpy(), atol=1e-4)


def test_candidates_are_the_most_likely_ids_in_order(student: tuple[Any, Any]) -> None:
    model, _ = student
    row = next(iter(sample(student, PROMPTS).values()))
    ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1]
    assert row.candidates is not None
    np.testing.assert_array_equal(row.candidates, logits.topk(4, -1).indices.numpy())


def test_the_end_of_sequence_id_ends_a_response_and_stays_in_it(student: tuple[Any, Any]) -> None:
    _, tokenizer = student
    for row in sample(student, PROMPTS).values():
        inner, last = row.response_ids[:-1].tolist(), int(row.response_ids[-1])
        assert tokenizer.eos_token_id not in inner
        assert row.truncated == (last != tokenizer.eos_token_id)
        assert row.length <= 12 and (row.length == 12 or not row.truncated)


def test_every_stop_token_ends_a_response_and_stays_in_it(chat_model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(chat_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    stops = frozenset({0, 2, 77})
    spec = RolloutSpec(7, 64, 0, len(tokenizer), 40, stops)
    plan = plan_step(2, [Prompt.make(p) for p in PROMPTS], samples=16, max_new_tokens=100, temperature=1.0)
    rows = rollout(model, tokenizer, plan.rows, spec)
    assert {int(row.response_ids[-1]) for row in rows if not row.truncated} == stops
    for row in rows:
        assert not stops & set(row.response_ids[:-1].tolist())
        assert row.truncated == (int(row.response_ids[-1]) not in stops)


def test_rows_are_handed_over_the_moment_they_finish(student: tuple[Any, Any]) -> None:
    model, tokenizer = student
    spec = RolloutSpec(seed=7, batch_rows=64, candidates=0, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    plan = plan_step(2, [Prompt.make(p) for p in PROMPTS], samples=8, max_new_tokens=12, temperature=1.0)
    lengths: list[int] = []
    rows = rollout(model, tokenizer, plan.rows, spec, on_row=lambda row: lengths.append(row.length))
    assert lengths == sorted(lengths) and len(set(lengths)) > 1
    assert len(rows) == len(lengths)


def test_a_prompt_over_the_limit_is_named(student: tuple[Any, Any]) -> None:
    with pytest.raises(DataError, match="over the limit of 40"):
        sample(student, ["1" * 60])


def test_inverse_cdf_sampling_draws_the_softmax_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0, 5.0]]).expand(10_000, -1)
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000  # so that shares are exact to one draw
    ids, logp = draw(logits, uniform, 1.5, valid_vocab=4)
    expected = torch.softmax(logits[0, :4] / 1.5, -1)
    counts = torch.bincount(ids, minlength=4) / len(ids)
    torch.testing.assert_close(counts, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(logp, expected.log()[ids])


@pytest.mark.parametrize("uniform", [1e-300, 0.5, 1 - 1e-16])
def test_extreme_uniforms_stay_inside_the_vocabulary(uniform: float) -> None:
    logits = torch.tensor([[0.0, -1e9, -1e9, -1e9]])
    ids, _ = draw(logits, torch.tensor([uniform], dtype=torch.float64), 1.0, valid_vocab=4)
    assert ids.item() == 0


def test_temperature_zero_is_greedy() -> None:
    ids, _ = draw(torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([0.01], dtype=torch.float64), 0.0, 3)
    assert ids.item() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_an_error_that_names_the_prompt(
    student: tuple[Any, Any], value: float, temperature: float
) -> None:
    model = copy.deepcopy(student[0])
    with torch.no_grad():
        model.get_output_embeddings().weight[7] = value
    with pytest.raises(NonFiniteError, match=r"not finite .*train\.learning_rate"):
        sample((model, student[1]), PROMPTS, temperature=temperature)


def test_a_row_that_may_reach_other_positions_than_it_began_with_is_refused(student: tuple[Any, Any]) -> None:
    """Longrope: beyond the original length all tokens of a row get other log-probs than they were drawn with."""
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=len(student[1]), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, original_max_position_embeddings=18, rope_parameters=rope, pad_token_id=0,
    )  # fmt: skip
    model = Phi3ForCausalLM(config).eval()
    assert len(sample((model, student[1]), ["12+34="])) == 3  # 6 tokens and 12
    with pytest.raises(DataError, match=r"19 tokens .*18, .*rollout\.max_new_tokens"):
        sample((model, student[1]), ["1+1=", "123+34="])


def planned(prompt: str, **changes: Any) -> PlannedRow:
    (row,) = plan_step(2, [Prompt.make(prompt)], samples=1, max_new_tokens=6, temperature=0.0).rows
    return replace(row, **changes)


def roll(student: tuple[Any, Any], *rows: PlannedRow) -> list[Row]:
    model, tokenizer = student
    spec = RolloutSpec(seed=7, batch_rows=8, candidates=4, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    return rollout(model, tokenizer, rows, spec)


def test_a_response_continues_its_prefix_and_is_trained_on_what_follows(student: tuple[Any, Any]) -> None:
    (whole,) = roll(student, planned("12+34="))
    prefix = tuple(whole.response_ids[:2].tolist())
    (row,) = roll(student, planned("12+34=", prefix_ids=prefix, tags={"mode": "x"}))
    shared = min(whole.length, row.length)
    assert row.response_ids[:shared].tolist() == whole.response_ids[:shared].tolist()  # greedy: the same continuation
    assert row.loss_mask.tolist() == [False] * 2 + [True] * (row.length - 2)
    assert np.isnan(row.behaviour_logp[:2]).all()
    np.testing.assert_allclose(row.behaviour_logp[2:shared], whole.behaviour_logp[2:shared], atol=1e-4)
    assert row.candidates is not None and len(row.candidates) == row.length
    assert row.turns == ((2, row.length),) and row.tags == {"mode": "x"}


def test_a_row_can_have_stop_ids_of_its_own(student: tuple[Any, Any]) -> None:
    (whole,) = roll(student, planned("12+34="))
    first = int(whole.response_ids[0])
    (cut,) = roll(student, planned("12+34=", stop_ids=frozenset({first})))
    assert cut.response_ids.tolist() == [first] and not cut.truncated


def one(student: tuple[Any, Any], **changes: Any) -> Row:
    model, tokenizer = student
    key = RowKey(2, "fixed", 0)  # one random stream whatever is asked
    planned = PlannedRow(**{"key": key, "prompt": Prompt.make("12+34="), "max_new_tokens": 12, **changes})
    spec = RolloutSpec(seed=7, batch_rows=8, candidates=4, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    (row,) = rollout(model, tokenizer, [planned], spec, policy_version=5)
    return row


def test_a_row_is_sampled_under_its_hint_and_kept_under_its_prompt(student: tuple[Any, Any]) -> None:
    hint = Prompt.make("the sum is 46. 12+34=")
    hinted = one(student, temperature=1.0, behaviour_prompt=hint, tags={"arm": "hint"})
    plainly = one(student, temperature=1.0, prompt=hint)
    assert hinted.response_ids.tolist() == plainly.response_ids.tolist()
    assert hinted.behaviour_logp.tolist() == plainly.behaviour_logp.tolist()
    assert hinted.prompt.text == "12+34="
    assert hinted.behaviour_prompt_ids is not None
    assert hinted.behaviour_prompt_ids.tolist() == plainly.prompt_ids.tolist()
    assert len(hinted.prompt_ids) < len(plainly.prompt_ids)
    assert hinted.origin == "hinted" and not hinted.on_policy and plainly.on_policy
    assert hinted.tags == {"arm": "hint"} and set(hinted.policy_version) == {5}
