"""Mixtures of experts: students through the whole loop, and teachers over gRPC."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import assert_same, state_of
from run_records import metrics_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from opd.fleet.source import ScoreSource
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from student.job.session import train
from student.settings.recipe import Recipe
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine


def test_experts_and_router_learn_whole_or_sharded(
    make_recipe: Callable[..., Recipe], experts: Path, tmp_path: Path
) -> None:
    lines, weights = [], []
    for sharding in ("none", "fsdp"):
        changes: dict[str, Any] = {"model": {"path": str(experts)}, "eval": {"prompts": 0}}
        changes["train"] = {"steps": 2, "sharding": sharding, "learning_rate": 1e-2}
        run = make_recipe(run=str(tmp_path / sharding), **changes)
        train(run)
        lines.append(metrics_of(run.run))
        weights.append(load_file(run.run / "checkpoints" / "step-000002" / "model" / "model.safetensors"))
    first = load_file(experts / "model.safetensors")
    assert set(first) == set(weights[0]) == set(weights[1])  # an expert a tensor, as others load them
    moved = [name for name, tensor in weights[0].items() if not torch.equal(tensor, first[name])]
    assert any(".mlp.gate." in name for name in moved) and any(".experts.3." in name for name in moved)
    for mine, theirs in zip(*lines, strict=True):
        for name in ("loss/opd", "grad_norm", "response_tokens"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_two_ranks_replay_and_learn_like_one_whole_or_sharded(
    make_recipe: Callable[..., Recipe], experts: Path, tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    changes: dict[str, Any] = {
        "model": {"path": str(experts)},
        "eval": {"prompts": 0},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
    }
    train_of = {"steps": 2, "minibatches": 2, "learning_rate": 1e-2, "micro_batch_tokens": 64}
    runs = [
        make_recipe(
            run=str(tmp_path / f"{sharding}-{source}"),
            methods=[{"name": "routing_replay", "source": source}],
            train={**train_of, "sharding": sharding},
            **changes,
        )
        for sharding, source in (("none", "rollout"), ("fsdp", "old"))
    ]
    two_ranks(*runs)
    for two in runs:
        one = two.model_copy(update={"run": two.run.with_name(f"{two.run.name}-one")})
        train(one)
        for mine, theirs in zip(metrics_of(one.run), metrics_of(two.run), strict=True):
            assert mine["routing/replayed"] > 0.5
            for name in ("loss/opd", "grad_norm", "routing/replayed", "routing/changed"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_experts_of_two_ranks_are_those_of_one_and_a_resumed_run_has_the_same_bits(
    make_recipe: Callable[..., Recipe], experts: Path, tmp_path: Path, two_ranks: Callable[..., Any]
) -> None:
    common: dict[str, Any] = {
        "model": {"path": str(experts)},
        "eval": {"prompts": 0},
        # Three prompts of two samples: one rank gets more rows, and so more micro-batches, than the other.
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
        "methods": [{"name": "routing_replay", "source": "rollout"}],
    }

    def recipe(name: str, sharding: str, steps: int) -> Recipe:
        train_of = {"steps": steps, "minibatches": 2, "micro_batch_tokens": 64, "sharding": sharding}
        return make_recipe(run=str(tmp_path / name), **common, train=train_of)

    one = recipe("one", "none", 4)
    train(one)
    calm = [recipe(f"calm-{sharding}", sharding, 4) for sharding in ("none", "fsdp")]
    cut = [recipe(f"cut-{sharding}", sharding, steps) for sharding in ("none", "fsdp") for steps in (2, 4)]
    two_ranks(*calm, *cut)  # a run that exists is resumed
    for whole, resumed in zip(calm, cut[1::2], strict=True):
        assert_same(state_of(at(resumed, 4)), state_of(at(whole, 4)))
        first, mine, theirs = load_file(experts / "model.safetensors"), state_of(at(one, 4)), state_of(at(whole, 4))
        # Two ranks add the same float32 terms in another order. Adam divides by the gradient's own size, so a single
        # weight of hardly any gradient may go elsewhere; a whole tensor may not: 2e-6 of its way was measured.
        for name, tensor in first.items():
            moved = (mine[f"model/{name}"] - tensor).norm()
            assert moved > 0 and (theirs[f"model/{name}"] - mine[f"model/{name}"]).norm() < 1e-3 * moved, name


@pytest.fixture(params=["--deterministic", "--max-batch-tokens=4096"], ids=["deterministic", "usual"])
def served(request: pytest.FixtureRequest, experts: Path, serve: Callable[..., Any]) -> Iterator[ScoreSource]:
    """A mixture whose tokens and experts differ clearly, served in the deterministic mode and in the usual one."""
    model = AutoModelForCausalLM.from_pretrained(experts)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    model.save_pretrained(experts)
    server = serve("--model", f"experts={experts}", request.param)
    with TeacherFleet.connect(server.address) as fleet:
        yield fleet
    server.process.kill()


def test_a_served_mixture_says_what_the_model_says_in_this_process(
    served: ScoreSource, experts: Path, request: pytest.FixtureRequest
) -> None:
    model = AutoModelForCausalLM.from_pretrained(experts).eval()
    engine = TransformersEngine(str(experts), device="cpu", deterministic=True)
    deterministic = served.describe("experts").deterministic
    assert deterministic == ("[deterministic]" in request.node.name)
    tolerance = 0.0 if deterministic else 2e-5
    random, k = np.random.default_rng(0), 8
    vocabulary = engine.info.vocab_size
    items = [
        ScoreItem(
            random.integers(0, vocabulary, prompt + length).astype(np.uint32),
            prompt,
            np.stack([random.permutation(vocabulary)[:k] for _ in range(length)]).astype(np.uint32),
        )
        for prompt, length in ((5, 7), (1, 3), (20, 1), (9, 30))
    ]
    with torch.no_grad():
        logits = [
            model(torch.from_numpy(item.token_ids.astype(np.int64))[None]).logits[0, :, :vocabulary] for item in items
        ]
    logp = [
        torch.log_softmax(one.double(), -1)[i.prompt_length - 1 : -1].numpy()
        for one, i in zip(logits, items, strict=True)
    ]
    assert all(one.std() > 0.5 for one in logp)  # another model would say something else

    for spec in (PayloadSpec.gather(k, "f32"), PayloadSpec.topk(k, "f32"), PayloadSpec.hidden("f32")):
        asked = items if spec.kind is PayloadKind.GATHER else [replace(item, gather_ids=None) for item in items]
        here = engine.score([EngineItem(item, spec, 1.0) for item in asked])
        for item, there, mine, true in zip(asked, served.score("experts", asked, spec), here, logp, strict=True):
            assert mine is not None
            for name in ("sampled", "values", "log_tail", "hidden"):
                got, wanted = getattr(there, name), getattr(mine, name)
                assert (got is None) == (wanted is None)
                if got is not None:
                    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance, err_msg=f"{spec.kind} {name}")
            if spec.kind is PayloadKind.HIDDEN:
                said = torch.log_softmax(torch.from_numpy(there.hidden @ served.head("experts").weight.T).double(), -1)
                np.testing.assert_allclose(said[:, :vocabulary].numpy(), true, atol=2e-4)
                continue
            ids = there.ids if item.gather_ids is None else item.gather_ids
            if item.gather_ids is None:
                np.testing.assert_array_equal(ids, mine.ids)
            rows = np.arange(item.response_length)
            np.testing.assert_allclose(there.values, np.take_along_axis(true, ids.astype(np.int64), -1), atol=2e-4)
            np.testing.assert_allclose(there.sampled, true[rows, item.response_ids], atol=2e-4)


def at(recipe: Recipe, step: int) -> Path:
    return recipe.run / "checkpoints" / f"step-{step:06d}"


@pytest.mark.parametrize("source", ["rollout", "old"])
def test_a_student_without_experts_is_refused_before_the_first_step(
    make_recipe: Callable[..., Recipe], source: str
) -> None:
    recipe = make_recipe(
        methods=[{"name": "routing_replay", "source": source}], train={"steps": 1}, eval={"prompts": 0}
    )
    with pytest.raises(ConfigError, match="routing_replay found no router"):
        train(recipe)
    assert not recipe.run.exists()
