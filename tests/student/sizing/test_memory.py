"""The plan's memory against a process that does what it plans for; what cannot fit is refused with the way out."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import yaml
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from opd.config import parse_settings
from opd.errors import ConfigError
from student.data.needs import Needs
from student.job.plugins import build_plugins
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe
from student.sizing.hardware import GIB, TABLE, Hardware
from student.sizing.memory import CASTS, Memory, check_fits, memory_of, micro_batch
from student.sizing.plan import describe
from student.sizing.shape import ModelShape
from student.sizing.times import times_of

MEASURE = Path(__file__).parents[2] / "support" / "measure_memory.py"
CPU = Hardware("the CPU here", 16e9, 1e11, 1e10, 1e-4, 0.0)

CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "activations": (
        {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4, "vocab_size": 4096},
        {"train": {"micro_batch_tokens": 3072}, "rollout": {"batch_rows": 1, "prompts_per_step": 24}},
    ),
    "weights": (
        {"hidden_size": 448, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 32768},
        {"train": {"micro_batch_tokens": 256, "logit_scratch_mib": 16}, "rollout": {"batch_rows": 1}},
    ),
    "keys and values": (
        {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8, "num_key_value_heads": 8,
         "num_attention_heads": 8, "head_dim": 64, "vocab_size": 512},
        {"train": {"micro_batch_tokens": 512},
         "rollout": {"batch_rows": 24, "prompts_per_step": 24, "max_prompt_tokens": 500, "max_new_tokens": 12}},
    ),
    "gathered weights": (
        {"hidden_size": 448, "intermediate_size": 1024, "num_hidden_layers": 3, "vocab_size": 32768},
        {"train": {"micro_batch_tokens": 256, "logit_scratch_mib": 16, "sharding": "fsdp"},
         "rollout": {"batch_rows": 4}},
    ),
}  # fmt: skip


MODELS: dict[str, Path] = {}
"""Models by their sizes, each saved by the first test that looks at it."""
SHAPES: dict[str, ModelShape] = {}


def shape_of(model: ModelSettings) -> ModelShape:
    """What a model computes and keeps, found once for its settings."""
    key = model.model_dump_json()
    if key not in SHAPES:
        SHAPES[key] = ModelShape(model)
    return SHAPES[key]


def make(world: Path, folder: Path, shape: dict[str, int], changes: dict[str, Any]) -> Recipe:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48, "tie_word_embeddings": True, **shape}
    if (model := MODELS.get(str(sizes))) is None:
        model = MODELS[str(sizes)] = folder / "model"
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(model)
        AutoTokenizer.from_pretrained(world / "student").save_pretrained(model)
    data: dict[str, Any] = {
        "run": str(folder / "run"),
        "model": {"path": str(model)},
        "prompts": {"task": "addition"},
        "objective": [{"name": "sft", "rows": "all"}],
        "rollout": {"max_prompt_tokens": 64, "max_new_tokens": 64, "prompts_per_step": 8},
        "train": {"threads": 1, "mixed_precision": "no"},
    }
    for group, values in changes.items():
        data[group] = {**data.get(group, {}), **values}
    return parse_settings(Recipe, data)


def planned(recipe: Recipe, ranks: int = 1) -> Memory:
    return memory_of(recipe, shape_of(recipe.model), build_plugins(recipe).needs, CPU, gpu=False, ranks=ranks)


@pytest.mark.parametrize(
    "case", [case if case == "activations" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_planned_memory_is_within_fifteen_percent_of_a_process_that_does_it(
    world: Path, tmp_path: Path, case: str
) -> None:
    recipe = make(world, tmp_path, *CASES[case])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    done = forked.run([sys.executable, str(MEASURE), str(tmp_path / "recipe.yaml"), str(world / "student")])
    assert done.returncode == 0, done.stderr
    measured, memory = float(done.stdout.split()[-1]), planned(recipe)
    assert measured > 1.5e8
    assert memory.peak == pytest.approx(measured, rel=0.15), memory


def test_copies_checkpointing_and_adapters_change_the_parts_they_should(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    plain = planned(recipe)

    def other(**model: Any) -> Memory:
        return planned(recipe.model_copy(update={"model": recipe.model.model_copy(update=model)}))

    part = "activations of a micro-batch"
    assert other(gradient_checkpointing=True).learning[part] < 0.5 * plain.learning[part]
    half = other(dtype="bfloat16")
    assert half.always["weights"] == plain.always["weights"] / 2
    data = recipe.model_dump(mode="json")
    data["model"]["lora"] = {"rank": 4}
    adapters = planned(parse_settings(Recipe, data))
    assert adapters.always["moments of AdamW"] < 0.1 * plain.always["moments of AdamW"]
    assert adapters.learning["gradients of head and embeddings"] == 0
    data["model"]["lora"] = None
    data["objective"] = [{"name": "sft", "rows": "all"}, {"name": "reference_kl"}]
    data["teachers"] = {"reference": "initial"}
    kept = planned(parse_settings(Recipe, data)).always
    assert kept["copy for the reference initial"] == kept["weights"]


def test_a_sharded_student_is_spread_over_the_ranks_and_whole_while_it_decodes(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["weights"])
    whole = planned(recipe, ranks=4)
    data = recipe.model_dump(mode="json")
    data["train"]["sharding"] = "fsdp"
    sharded = planned(parse_settings(Recipe, data), ranks=4)
    assert sharded.always == {name: size / 4 for name, size in whole.always.items()}
    assert sharded.learning["gradients"] == whole.learning["gradients"] / 4
    assert sharded.rollout["all weights gathered"] == whole.always["weights"]
    part = "buckets of gradients between ranks"
    assert whole.learning[part] > 0 == sharded.learning[part]
    # Embeddings, which are the head too, are most of this model; two of its three layers are gathered beside them.
    assert 0.9 * whole.always["weights"] < sharded.learning["weights gathered"] < whole.always["weights"]
    data["train"]["mixed_precision"] = "bf16"
    half = ModelShape(recipe.model, torch.bfloat16, sharded=True)
    needs = build_plugins(recipe).needs
    gathered = memory_of(parse_settings(Recipe, data), half, needs, CPU, gpu=False, ranks=4)
    assert gathered.rollout["all weights gathered"] == whole.always["weights"] / 2
    assert gathered.always == sharded.always
    # The weights are bfloat16 themselves: no copies of them are kept for the backward pass, as autocast makes them.
    casting = ModelShape(recipe.model, torch.bfloat16)
    assert casting.activation_bytes(2, 64) - half.activation_bytes(2, 64) > 0.99 * 3 * half.layer * 2
    # Decoding keeps them as well, and has nothing to cast where the weights are float32 all through.
    assert memory_of(recipe, casting, needs, CPU, gpu=False).rollout[CASTS] == 3 * half.layer * 2
    assert whole.rollout[CASTS] == gathered.rollout[CASTS] == 0


def test_moments_in_eight_bits_are_counted_in_float32_where_ranks_cut_blocks(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    shape, needs = shape_of(recipe.model), build_plugins(recipe).needs

    def of_all(ranks: int, **train: str) -> float:
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})
        found = memory_of(changed, shape, needs, CPU, gpu=False, ranks=ranks).always["moments of AdamW"]
        return ranks * found if train["sharding"] == "fsdp" else found

    eight = {"optimizer": "adamw_8bit"}
    alone = of_all(1, **eight, sharding="none")
    assert 2.03 * shape.trained < alone < 2.04 * shape.trained
    assert of_all(2, **eight, sharding="fsdp") == of_all(3, **eight, sharding="none") == alone
    # Of 4,096 rows of embeddings, three ranks take 1,366 each, and four rows of 192 fill whole blocks.
    embeddings = 4096 * 192
    assert 5.96 * embeddings < of_all(3, **eight, sharding="fsdp") - alone < 8 * shape.trained - alone


def test_a_micro_batch_has_no_more_rows_than_a_rank_unless_methods_add_some(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    data = recipe.model_dump(mode="json")
    data["train"]["micro_batch_tokens"] = 10**6
    roomy, part = parse_settings(Recipe, data), "activations of a micro-batch"
    assert planned(roomy).learning[part] == planned(recipe).learning[part]
    assert "micro-batch of 24 x 128 tokens" in "\n".join(describe(roomy, CPU))
    assert "micro-batch of 5 x 128 tokens" in "\n".join(describe(roomy, CPU, ranks=5))
    data["methods"] = [{"name": "expert_rows", "cold_steps": 1}]
    assert micro_batch(parse_settings(Recipe, data), 1) == (7812, 128)


@pytest.mark.parametrize(
    ("memory", "changes", "said"),
    [
        (0.020, {}, r"moments .*need .*; shard them over ranks .*, train adapters"),
        (0.150, {}, "gradient_checkpointing to true or set train.micro_batch_tokens to"),
        (0.500, {"rollout": {"batch_rows": 2000, "prompts_per_step": 2000}}, "set rollout.cache_tokens to"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_the_setting_to_change(
    world: Path, tmp_path: Path, memory: float, changes: dict[str, Any], said: str
) -> None:
    shape, group = CASES["activations"]
    recipe = make(world, tmp_path, {**shape, "num_key_value_heads": 4}, {**group, **changes})
    small = replace(CPU, memory=memory * GIB)
    with pytest.raises(ConfigError, match=said):
        check_fits(planned(recipe), small, recipe)
    check_fits(planned(recipe), TABLE["h100"], recipe)


def test_vllm_has_its_weights_and_its_whole_cache_always_or_while_it_is_awake(world: Path, tmp_path: Path) -> None:
    shape, group = CASES["keys and values"]
    cache = {"batch_rows": 24, "max_prompt_tokens": 500, "max_new_tokens": 12, "cache_tokens": 20_000}
    recipe = make(world, tmp_path, shape, {**group, "rollout": {**cache, "engine": {"name": "vllm"}}})
    model = shape_of(recipe.model)

    def of(recipe: Recipe) -> Memory:
        return memory_of(recipe, model, Needs(), CPU, gpu=False)

    awake = of(recipe)
    assert awake.always["keys and values of vLLM"] == 20_000 * model.cache_bytes and not awake.rollout
    assert awake.always["weights of vLLM"] == model.total * 4
    transformers = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(
        update={"engine": {"name": "transformers"}})})  # fmt: skip
    assert awake.learning == of(transformers).learning, "training beside vLLM takes what it takes alone"
    sleepy = of(recipe.model_copy(update={"rollout": recipe.rollout.model_copy(
        update={"engine": {"name": "vllm", "sleep": True}})}))  # fmt: skip
    assert sleepy.rollout["keys and values of vLLM"] > 0 and sleepy.peak < awake.peak
    small = replace(CPU, memory=awake.peak * 0.9)
    with pytest.raises(ConfigError, match=r"rollout\.cache_tokens to (\d+)") as refused:
        check_fits(awake, small, recipe)
    fitting = int(str(refused.value).split("cache_tokens to ")[1].split()[0])
    less = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"cache_tokens": fitting})})
    check_fits(of(less), small, less)


def test_servers_beside_the_student_take_nothing_of_its_device(world: Path, tmp_path: Path) -> None:
    shape, group = CASES["keys and values"]
    group = {**group, "train": {**group.get("train", {}), "max_staleness": 2}}
    recipe = make(world, tmp_path, shape, group)
    beside = {"engine": {"name": "vllm_server", "endpoints": ["http://nowhere:1"]}}
    served = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=beside)})
    model, copies = shape_of(recipe.model), "weights that steps are sampled with"

    def on_gpu(recipe: Recipe) -> Memory:
        return memory_of(recipe, model, Needs(), TABLE["h100"], gpu=True)

    assert on_gpu(recipe).rollout["keys and values"] > 0 and not on_gpu(served).rollout
    assert on_gpu(recipe).always[copies] == model.trained_bytes and copies not in on_gpu(served).always


def test_the_dtype_of_vllm_counts_for_its_weights_and_its_cache(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    model = shape_of(recipe.model)

    def of(**engine: str) -> dict[str, float]:
        data = recipe.model_dump(mode="json")
        data["rollout"]["engine"] = {"name": "vllm", **engine}
        return memory_of(parse_settings(Recipe, data), model, Needs(), CPU, gpu=False).always

    parts = ("weights of vLLM", "keys and values of vLLM")
    assert all(of(dtype="bfloat16")[part] == of()[part] / 2 > 0 for part in parts)
    assert all(of(dtype="float32")[part] == of(dtype="auto")[part] == of()[part] for part in parts)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_advice_about_the_cache_fits_and_a_slot_more_does_not(world: Path, tmp_path: Path, sharding: str) -> None:
    recipe = make(world, tmp_path, *CASES["keys and values"])
    data = recipe.model_dump(mode="json")
    data["train"]["sharding"] = sharding

    def of(cache_tokens: int) -> tuple[Memory, Recipe]:
        data["rollout"]["cache_tokens"] = cache_tokens
        made = parse_settings(Recipe, data)
        return planned(made, ranks=2), made

    before, made = of(10**6)
    gathered = before.rollout["all weights gathered"]
    assert (gathered > 0) == (sharding == "fsdp")
    # Half of the slots have room, beside weights that are as large as ever.
    small = replace(CPU, memory=(before.peak - (sum(before.rollout.values()) - gathered) / 2) / 0.92)
    with pytest.raises(ConfigError, match=r"cache_tokens to (\d+)") as refused:
        check_fits(before, small, made)
    fitting = int(str(refused.value).split("cache_tokens to ")[1].split()[0])
    check_fits(of(fitting)[0], small, made)
    with pytest.raises(ConfigError):
        check_fits(of(fitting + 512)[0], small, made)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("keys and values", r"shorten the longest response \(rollout\.max_new_tokens, now 64\)"),
        ("all weights gathered", "most of it is all weights gathered, which a smaller cache does not change"),
    ],
)
def test_where_the_smallest_cache_is_too_large_the_advice_is_another(
    world: Path, tmp_path: Path, part: str, said: str
) -> None:
    rollout = {"keys and values": 2.0 * GIB, "all weights gathered": 1.0 * GIB} | {part: 4.0 * GIB}
    memory = Memory(always={"weights": GIB}, learning={"gradients": GIB}, rollout=rollout, slots=4)
    with pytest.raises(ConfigError, match=said):
        check_fits(memory, replace(CPU, memory=5 * GIB), make(world, tmp_path, *CASES["activations"]))


def test_following_the_advice_makes_it_fit(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    small = replace(CPU, memory=0.3 * GIB)
    with pytest.raises(ConfigError, match=r"micro_batch_tokens to (\d+)") as refused:
        check_fits(planned(recipe), small, recipe)
    fitting = int(str(refused.value).split("micro_batch_tokens to ")[1].split()[0])
    assert fitting < recipe.train.micro_batch_tokens
    train = recipe.train.model_copy(update={"micro_batch_tokens": fitting})
    fits = recipe.model_copy(update={"train": train})
    check_fits(planned(fits), small, fits)


def test_the_plan_follows_what_is_seen_of_an_episode(world: Path, tmp_path: Path) -> None:
    made = make(world, tmp_path, *CASES["activations"])
    data = made.model_dump(mode="json")
    data["rollout"] |= {"max_new_tokens": 512}

    def plan_of(device: Hardware = TABLE["h100"], **episodes: Any) -> tuple[Recipe, str]:
        data["rollout"]["episodes"] = {"turns": 16, "turn_tokens": 16, **episodes}
        found = parse_settings(Recipe, data)
        return found, "\n".join(describe(found, device, mean=512.0))

    _, whole = plan_of()
    short, lines = plan_of(history=2)
    assert "windows" not in whole and "micro-batch of 5 x 576 tokens" in whole
    assert "in up to 14 windows of 160 tokens, which share a micro-batch\n" in lines
    assert "micro-batch of 14 x 160" in lines and "each read in 14 windows, 1792 tokens with their prompts" in lines
    _, summed = plan_of(history="summary", summary={"context_tokens": 256, "tokens": 32})
    assert "in up to 3 windows of 256 tokens" in summed and "micro-batch of 12 x 256" in summed
    data["train"]["micro_batch_tokens"] = 300
    _, over = plan_of(history=2)
    assert "which share a micro-batch: more than train.micro_batch_tokens, 300" in over
    short = short.model_copy(update={"train": short.train.model_copy(update={"micro_batch_tokens": 300})})
    big = Memory(always={}, learning={"gradients": 0.0, "activations of a micro-batch": 9 * GIB}, rollout={})
    with pytest.raises(ConfigError, match=r"max_new_tokens, now 512.*14 of 160 tokens"):
        check_fits(big, replace(CPU, memory=5 * GIB), short)


def test_the_plan_tells_memory_time_and_traffic(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    data = recipe.model_dump(mode="json") | {
        "objective": [{"name": "opd", "payload": "topk", "k": 64}],
        "teachers": {"endpoints": ["localhost:1"]},
    }
    lines = "\n".join(describe(parse_settings(Recipe, data), TABLE["h100"], ranks=2, mean=32.0))
    for part in ("moments of AdamW", "keys and values", "buckets of gradients", "peak of a rank", "tokens per second"):
        assert part in lines
    # Rows of 32 tokens after 32 of prompts: ids of 4 bytes up; 64 values of 2 and ids of 2.25 bytes down, and 8.
    up, down = 24 * 64 * 4 / 1e6, 24 * 32 * (64 * 4.25 + 8) / 1e6
    assert f"network {up:.1f} MB to teachers, {down:.1f} MB from them" in lines


@pytest.mark.parametrize("mean", [-1.0, 64.5])
def test_a_mean_that_no_response_can_have_is_refused(world: Path, tmp_path: Path, mean: float) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    with pytest.raises(ConfigError, match=r"--mean-tokens is .*rollout\.max_new_tokens, 64"):
        list(describe(recipe, CPU, mean=mean))


def test_what_a_gpu_does_at_once_a_cpu_does_in_turn(world: Path, tmp_path: Path) -> None:
    recipe = make(world, tmp_path, *CASES["activations"])
    shape, needs = shape_of(recipe.model), build_plugins(recipe).needs
    at_once, in_turn = (
        times_of(recipe, shape, needs, replace(CPU, overlaps=overlaps), mean=32.0, ranks=1)
        for overlaps in (True, False)
    )
    assert at_once.stages["learn"] == in_turn.stages["learn"]
    assert at_once.stages["rollout"] < in_turn.stages["rollout"] < 3 * at_once.stages["rollout"]
