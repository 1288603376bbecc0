"""Slots that are filled again: the same rows as alone, bit for bit, in fewer forwards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow_cases import slow
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row
from student.rollout.batches import BatchDecoder
from student.rollout.draw import draw
from student.rollout.requests import Request, RolloutSpec
from student.rollout.slots import SlotDecoder, takes_slots
from student.rollout.transformers import rollout

SPEC = RolloutSpec(seed=7, batch_rows=8, candidates=4, valid_vocab=38, max_prompt_tokens=40)


@pytest.fixture(scope="module")
def tokenizer(world: Path) -> Any:
    torch.set_num_threads(1)
    return AutoTokenizer.from_pretrained(world / "student")


@pytest.fixture(scope="module", params=["sdpa", *slow("eager")])
def model(world: Path, request: pytest.FixtureRequest) -> Any:
    return AutoModelForCausalLM.from_pretrained(world / "student", attn_implementation=request.param).eval()


def plan(rows: int = 24) -> list[PlannedRow]:
    """Rows of two samples per prompt, whose longest answers differ widely."""
    prompts = [Prompt.make("+".join(str(7 * i + j) for j in range(1 + i % 5)) + "=") for i in range(rows // 2)]
    planned = plan_step(2, prompts, samples=2, max_new_tokens=12, temperature=1.0).rows
    return [replace(row, max_new_tokens=3 + (11 * i) % 60) for i, row in enumerate(planned)]


def bits(row: Row) -> tuple[bytes, ...]:
    assert row.candidates is not None
    return row.response_ids.tobytes(), row.behaviour_logp.tobytes(), row.candidates.tobytes()


def test_a_row_is_the_same_bits_for_any_number_of_slots_and_any_order(model: Any, tokenizer: Any) -> None:
    assert takes_slots(model, 99)
    spec = replace(SPEC, valid_vocab=len(tokenizer))
    found = [
        {row.key: bits(row) for row in rollout(model, tokenizer, rows, replace(spec, batch_rows=slots))}
        for slots, rows in ((4, plan()), (8, plan()), (32, plan()), (8, plan()[::-1]), (1, plan()[:3]))
    ]
    for other in found[1:]:
        assert all(found[0][key] == row for key, row in other.items())
    assert len({len(ids) for ids, _, _ in found[0].values()}) > 8


def test_rows_are_those_of_a_forward_over_the_whole_row(model: Any, tokenizer: Any) -> None:
    vocab = len(tokenizer)
    mixed = [replace(row, temperature=(1.0, 0.7, 0.0)[i % 3]) for i, row in enumerate(plan())]
    for planned, row in zip(mixed, rollout(model, tokenizer, mixed, replace(SPEC, valid_vocab=vocab)), strict=True):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(row.prompt_ids) - 1 : -1, :vocab].float()
        logp = (logits / (planned.temperature or 1.0)).log_softmax(-1)
        picked = logp.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(row.behaviour_logp, picked.numpy(), atol=1e-4)
        if planned.temperature == 0.0:
            assert row.response_ids.tolist() == logits.argmax(-1).tolist()


def forwards(model: Any, work: Callable[[], object]) -> int:
    calls: list[int] = []
    handle = model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        work()
    finally:
        handle.remove()
    return len(calls)


def test_slots_take_fewer_forwards_than_batches_and_draw_the_same_tokens(model: Any, tokenizer: Any) -> None:
    spec = replace(SPEC, valid_vocab=len(tokenizer))

    def requests() -> list[Request]:
        found = [Request(row, tokenizer, spec, ("rollout",)) for row in plan(64)]
        return sorted(found, key=lambda request: len(request.input_ids))

    slots, batches = requests(), requests()

    def in_batches() -> None:
        for start in range(0, len(batches), spec.batch_rows):
            BatchDecoder(model, batches[start : start + spec.batch_rows], spec).run(lambda index: None)

    few = forwards(model, lambda: SlotDecoder(model, slots, spec).run(lambda index: None))
    many = forwards(model, in_batches)
    assert [request.ids for request in slots] == [request.ids for request in batches]
    assert 1.3 * few < many


def test_samples_of_one_prompt_share_its_forward(model: Any, tokenizer: Any) -> None:
    assert takes_slots(model, 99)  # asked once per model, by forwards of its own
    shapes: list[torch.Size] = []
    handle = model.base_model.register_forward_pre_hook(lambda _, args: shapes.extend(a.shape for a in args))
    planned = plan_step(2, [Prompt.make("12+34=")], samples=8, max_new_tokens=4, temperature=1.0).rows
    rows = rollout(model, tokenizer, planned, replace(SPEC, valid_vocab=len(tokenizer)))
    handle.remove()
    assert [shape for shape in shapes if shape[1] > 1] == [torch.Size([1, 16])]
    assert len({row.response_ids.tobytes() for row in rows}) > 1


def test_memory_bounds_the_rows_that_run_together() -> None:
    spec = replace(SPEC, batch_rows=64, cache_tokens=100_000)
    assert [spec.rows(longest) for longest in (100, 2_000, 16_000, 200_000)] == [64, 50, 6, 5]


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_models_with_sliding_windows_are_decoded_in_batches(tokenizer: Any, family: str) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 6,
    }  # fmt: skip
    made = MistralForCausalLM(MistralConfig(**shape)) if family == "mistral" else None
    sliding: Any = made or Gemma2ForCausalLM(Gemma2Config(**shape, attn_implementation="eager"))
    assert not takes_slots(sliding.eval(), 99)
    spec = replace(SPEC, valid_vocab=len(tokenizer))
    for row in rollout(sliding, tokenizer, plan(8), spec):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logp = sliding(ids).logits[0, len(row.prompt_ids) - 1 : -1].float().log_softmax(-1)
        picked = logp.gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(row.behaviour_logp, picked.numpy(), atol=1e-4)


def test_a_row_that_fills_all_positions_of_a_model_is_decoded(tokenizer: Any) -> None:
    """GPT-2 has a table of them: a prompt of 6 tokens, padded to 16, would read beyond its 10."""
    torch.manual_seed(0)
    table = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=10, n_embd=16, n_layer=1, n_head=2)
    ).eval()
    assert takes_slots(table, 10)
    planned = plan_step(2, [Prompt.make("12+34=")], samples=3, max_new_tokens=4, temperature=1.0).rows
    rows = rollout(table, tokenizer, [replace(row, stop_ids=frozenset()) for row in planned], SPEC)
    assert max(len(row.prompt_ids) + row.length for row in rows) == 10


def test_under_autocast_products_keys_and_values_are_bfloat16(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SPEC, valid_vocab=len(tokenizer))
    kinds: set[torch.dtype] = set()
    handle = model.base_model.layers[0].self_attn.k_proj.register_forward_hook(lambda *args: kinds.add(args[2].dtype))
    planned, held = plan(8), SlotDecoder._step
    layers: list[Any] = []

    def step(decoder: SlotDecoder, *args: Any) -> None:
        layers.extend(decoder.layers)
        held(decoder, *args)

    monkeypatch.setattr(SlotDecoder, "_step", step)
    half = rollout(model, tokenizer, planned, replace(spec, autocast=torch.bfloat16))
    handle.remove()
    assert {tensor.dtype for layer in layers for tensor in (layer.keys, layer.values)} == {torch.bfloat16}
    assert kinds == {torch.bfloat16} and next(model.parameters()).dtype == torch.float32
    again = rollout(model, tokenizer, planned, replace(spec, autocast=torch.bfloat16, batch_rows=4))
    assert [row.response_ids.tolist() for row in again] == [row.response_ids.tolist() for row in half]


@pytest.mark.parametrize("vocab", [7, 256, 1000])
def test_a_draw_is_that_of_a_cumulative_sum_over_the_whole_vocabulary(vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2000, vocab, generator=generator)
    logits[:, ::5] = -torch.inf
    uniform = torch.rand(2000, dtype=torch.float64, generator=generator)
    ids, logp = draw(logits, uniform, 1.0, vocab)
    cdf = logits.log_softmax(-1).double().exp().cumsum(-1)
    wanted = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)[:, 0]
    assert torch.equal(ids, wanted)
    assert torch.equal(logp, logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
    for edge in (1e-300, 1 - 1e-16):
        ids, logp = draw(logits[:50], torch.full((50,), edge, dtype=torch.float64), 1.0, vocab)
        assert (logp > -torch.inf).all()
