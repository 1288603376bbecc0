"""Rollout engine vllm: the rows of engine transformers, the student's weights after every sync, and what may fail."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from other_weights import train_adapters
from torch import Tensor

from opd.errors import ConfigError, DataError, NonFiniteError, RolloutEngineError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row, RowKey
from student.rollout import weights
from student.rollout.engine import RolloutEngine
from student.rollout.vllm.sleep import Sleep

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this"),
]

PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(8)]
Make = Callable[..., Any]


def plan(samples: int = 4, temperature: float = 1.0, tokens: int = 24) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=tokens, temperature=temperature).rows


def ids(rows: list[Row]) -> list[list[int]]:
    return [row.response_ids.tolist() for row in rows]


@torch.no_grad()
def moved(engine: RolloutEngine, factor: float = 0.9) -> None:
    for parameter in engine.setup.model.parameters():
        parameter.mul_(factor)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_are_those_of_engine_transformers(make_engine: Make, temperature: float) -> None:
    expected = make_engine("transformers").sample(plan(temperature=temperature))
    found = make_engine("vllm").sample(plan(temperature=temperature))
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.behaviour_logp, other.behaviour_logp, atol=1e-4)
        assert np.array_equal(one.candidates, other.candidates) and one.truncated == other.truncated


def test_rows_are_the_same_where_prompts_come_in_pieces_and_rows_are_put_off(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, never = plan(samples=3, tokens=40), frozenset({3})  # long ones: hardly any draws this id
    expected = make_engine("transformers", stop_ids=never).sample(rows)
    engine = make_engine("vllm", stop_ids=never)
    usual, roomy = engine.settings, engine.setup.spec
    small = {"options": {"max_num_batched_tokens": 24, "block_size": 32, "enable_prefix_caching": False}}
    try:
        engine.close()
        engine.settings = usual.model_copy(update=small)
        engine.setup = dataclasses.replace(
            engine.setup, spec=dataclasses.replace(roomy, batch_rows=24, cache_tokens=64)
        )
        engine.sync(engine.setup.model.named_parameters(), 3)
        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        put_off, preempt = [], scheduler._preempt_request

        def counted(*args: Any, **options: Any) -> Any:
            put_off.append(args)
            return preempt(*args, **options)

        monkeypatch.setattr(scheduler, "_preempt_request", counted)
        found = engine.sample(rows)
    finally:
        engine.close()
        engine.settings = usual
    assert put_off and not engine.take().get("engine/restarts")
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.behaviour_logp, other.behaviour_logp, atol=1e-4)
        assert np.array_equal(one.candidates, other.candidates)


def test_a_long_prompt_that_was_seen_with_old_weights_is_read_again(make_engine: Make) -> None:
    long = [PlannedRow(RowKey(1, "u", i), Prompt.make("12+34=" * 60), 4, 1.0) for i in range(2)]
    engine = make_engine("vllm", max_prompt_tokens=400)
    engine.sample(long)
    moved(engine)
    engine.sync(engine.setup.model.named_parameters(), 4)
    for row in engine.sample(long):
        whole = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = engine.setup.model(whole).logits[0, :-1, : engine.setup.spec.valid_vocab]
        logp = logits.log_softmax(-1).gather(-1, whole[0, 1:, None])[-row.length :, 0]
        np.testing.assert_allclose(row.behaviour_logp, logp.numpy(), atol=1e-3)


def test_a_prefix_cache_that_outlives_a_sync_is_found_out(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("vllm")
    moved(engine)
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    with pytest.raises(RolloutEngineError, match=r"known row differ .* nats"):
        engine.sync(engine.setup.model.named_parameters(), 4)
    with pytest.raises(RolloutEngineError, match="sync it before"):
        engine.sample(plan(1))
    monkeypatch.undo()
    engine.sync(engine.setup.model.named_parameters(), 4)
    assert {4} == set(engine.sample(plan(1))[0].policy_version)


@pytest.mark.parametrize("lost", ["lm_head", "q_proj", "model.norm"])
def test_weights_that_a_sync_does_not_reach_are_found_out(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    engine, every = make_engine("vllm"), weights.checkpoint_tensors

    def some(model: Any, given: Any) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in every(model, given) if lost not in name)

    moved(engine, 0.5)
    monkeypatch.setattr(weights, "checkpoint_tensors", some)
    with pytest.raises(RolloutEngineError, match="known row"):
        engine.sync(engine.setup.model.named_parameters(), 4)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_sync_that_fails_half_way_is_made_again_or_leaves_nothing_to_sample_from(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    engine, every, calls = make_engine("vllm"), weights.checkpoint_tensors, []
    before = ids(engine.sample(plan(1)))

    def half(model: Any, given: Any) -> Iterator[tuple[str, Tensor]]:
        calls.append(1)
        for number, pair in enumerate(every(model, given)):
            if number == 9 and len(calls) <= failures:
                raise OSError("out of memory")
            yield pair

    monkeypatch.setattr(weights, "checkpoint_tensors", half)
    if failures == 2:
        with pytest.raises(RolloutEngineError, match="weights: out of memory"):
            engine.sync(engine.setup.model.named_parameters(), 4)
        with pytest.raises(RolloutEngineError, match="sync it before"):
            engine.sample(plan(1))
    engine.sync(engine.setup.model.named_parameters(), 5)
    rows = engine.sample(plan(1))
    assert ids(rows) == before and {5} == {int(v) for row in rows for v in row.policy_version}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_sampled_with_and_tensors_that_are_given_go_before_the_model_s_own(
    make_engine: Make, dora: bool
) -> None:
    from student.model.lora import add_lora
    from student.settings.model import LoraSettings

    engine, same = make_engine("vllm"), make_engine("transformers")
    plain = ids(engine.sample(plan(1)))
    model = engine.setup.model
    add_lora(model, LoraSettings(rank=4, dora=dora), base=engine.setup.path)
    train_adapters(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    engine.sync(trained, 4)
    same.setup = dataclasses.replace(same.setup, model=model)
    assert ids(engine.sample(plan(1))) == ids(same.sample(plan(1))) != plain
    # Older tensors than the model holds, as of a row that is sampled behind the training.
    engine.sync([(name, torch.zeros_like(p) if "lora_B" in name else p) for name, p in trained], 5)
    assert (ids(engine.sample(plan(1))) == plain) or dora  # DoRA's norms are those of the base up to rounding


def test_a_model_that_gives_no_number_is_an_error_and_no_dead_engine(make_engine: Make) -> None:
    engine = make_engine("vllm")
    with torch.no_grad():
        engine.setup.model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RolloutEngineError, match=r"known row differ .* inf nats"):
        engine.sync(engine.setup.model.named_parameters(), 4)
    engine._whole = True
    with pytest.raises(NonFiniteError, match="log-probs were not finite"):
        engine.sample(plan(1))


def test_an_engine_that_dies_is_started_again_and_samples_what_is_left(make_engine: Make) -> None:
    expected = ids(make_engine("transformers").sample(plan(2)))
    engine = make_engine("vllm")
    told: list[Row] = []

    def on_row(row: Row) -> None:
        told.append(row)
        if len(told) == 5:
            engine._llm.llm_engine.engine_core.shutdown()

    rows = engine.sample(plan(2), on_row=on_row)
    assert ids(rows) == expected
    assert len(told) == len(rows) and {id(row) for row in told} == {id(row) for row in rows}  # none doubled
    assert engine.take()["engine/restarts"] == 1 and {3} == {int(v) for row in rows for v in row.policy_version}


def test_a_vllm_that_sleeps_between_rollouts_wakes_for_each_and_one_that_does_not_wake_is_started_again(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU whose memory could be given back: what is asked of vLLM is kept instead of done."""
    expected = ids(make_engine("transformers").sample(plan(1)))
    engine, asked = make_engine("vllm"), []

    def broken() -> None:
        asked.append("wake_up")
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(engine, "_sleep", Sleep(enabled=True))
    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(engine._llm, name, lambda name=name, **how: asked.append(name))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    for _ in range(2):
        assert ids(engine.sample(plan(1))) == expected
        engine.rest()
    monkeypatch.setattr(engine._llm, "wake_up", broken)
    assert ids(engine.sample(plan(1))) == expected
    assert asked == ["sleep", *["empty_cache", "wake_up", "sleep"], "empty_cache", "wake_up"]
    assert engine.take()["engine/restarts"] == 1


def test_the_process_keeps_its_random_states_and_threads(make_engine: Make) -> None:
    engine = make_engine("vllm")
    torch.manual_seed(5)
    state, setter = torch.random.get_rng_state(), torch.set_num_threads
    engine.close()
    engine.sync(engine.setup.model.named_parameters(), 4)
    assert torch.equal(torch.random.get_rng_state(), state) and torch.set_num_threads is setter


def test_a_row_that_may_outgrow_the_cache_is_refused_with_the_setting(make_engine: Make) -> None:
    engine = make_engine("vllm")
    with pytest.raises(DataError, match=r"raise rollout\.cache_tokens"):
        engine.sample([PlannedRow(RowKey(1, "u", 0), PROMPTS[0], engine._longest, 1.0)])


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("AbacusForCausalLM", "vLLM does not support the model family AbacusForCausalLM"),
        ("GPTNeoXForCausalLM", "vLLM runs GPTNeoXForCausalLM with transformers' own class.*vllm_server"),
    ],
)
def test_a_family_that_vllm_lacks_or_borrows_is_refused_before_anything_is_loaded(
    world: Path, tmp_path: Path, family: str, said: str
) -> None:
    from student.job.plugins import build_plugins

    folder = tmp_path / "student"
    shutil.copytree(world / "student", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [family]}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=said):
        build_plugins(recipe(folder))


def test_an_option_that_is_the_engine_s_own_is_refused(world: Path) -> None:
    from student.job.plugins import build_plugins

    with pytest.raises(ConfigError, match=r"rollout\.engine\.options\.seed"):
        build_plugins(recipe(world / "student", options={"seed": 3}))


def recipe(path: Path, **engine: Any) -> Any:
    from opd.config import parse_settings
    from student.settings.recipe import Recipe

    return parse_settings(
        Recipe,
        {
            "run": "never",
            "model": {"path": str(path)},
            "teachers": {"endpoints": ["nowhere:1"]},
            "prompts": {"task": "addition"},
            "rollout": {"engine": {"name": "vllm", **engine}},
        },
    )
