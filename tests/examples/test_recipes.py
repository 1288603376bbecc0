"""The recipes that ship: each passes a dry run, and holds the settings that its header claims."""

import json
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from transformers import Qwen3Config
from typer.testing import CliRunner

from opd.config import parse_settings
from opd_zoo.critics.hiper import tagged_of
from opd_zoo.environments.alfworld import command_of
from student.commands.cli import train
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe
from student.sizing.hardware import TABLE
from student.sizing.memory import check_fits, memory_of
from student.sizing.shape import ModelShape

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
ORBIT = [path for path in RECIPES if "fusion" in yaml.safe_load(path.read_text())]
TRAINED = [path for path in RECIPES if path not in ORBIT]
EXOPD = [path for path in RECIPES if "exopd" in path.name]


def read(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_a_recipe_passes_a_dry_run(path: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(train)
    changes = [f"run={tmp_path / 'run'}"]
    if read(path)["rollout"].get("engine", {}).get("name") == "vllm" and find_spec("vllm") is None:
        changes.append("rollout.engine={name: transformers}")
    package = {"alfworld": "fast_downward", "scienceworld": "scienceworld"}.get(read(path)["prompts"].get("task", ""))
    if package is not None and find_spec(package) is None:
        changes += ["prompts.task=rooms", "prompts.options={}"]  # `make envs` runs it as it is
    result = CliRunner().invoke(app, [str(path), *changes, "--dry-run", "--offline"])
    assert result.exit_code == 0, result.output
    assert "needs: " in result.output


@pytest.mark.parametrize("path", EXOPD, ids=lambda path: path.stem)
def test_an_exopd_recipe_holds_the_papers_settings(path: Path) -> None:
    recipe = read(path)
    (term,) = recipe["objective"]
    assert (term["name"], term["payload"], term["reward_scale"], term["importance_cap"]) == (
        "exopd",
        "sampled",
        1.25,
        5.0,
    )
    assert term["aggregation"] == "token_mean"
    rollout, optimizer = recipe["rollout"], recipe["train"]
    assert (rollout["prompts_per_step"], rollout["samples_per_prompt"], rollout["temperature"]) == (1024, 1, 1.0)
    assert (rollout["max_prompt_tokens"], rollout["max_new_tokens"]) == (2048, 16384)
    assert (optimizer["learning_rate"], optimizer["schedule"]) == (1e-5, "constant")
    assert optimizer["steps"] == (100 if "30b" in path.name else 50)
    assert recipe["teachers"]["reference"] == "start"


def test_there_are_recipes_for_a_twin_a_large_teacher_and_two_domains() -> None:
    assert len(EXOPD) == 3
    routes = {path.name: len(read(path)["teachers"].get("routes", {})) for path in EXOPD}
    assert sorted(routes.values()) == [0, 0, 2]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_micro_batch_holds_the_longest_row(path: Path) -> None:
    recipe = read(path)
    budget = max((mode["budget"] for mode in recipe.get("modes", {}).values()), default=0)
    for stage in [recipe] if path in TRAINED else [recipe["rl"], recipe["fusion"]]:
        longest = stage["rollout"]["max_prompt_tokens"] + stage["rollout"].get("max_new_tokens", budget)
        assert stage["train"].get("micro_batch_tokens", 16384) >= longest


@pytest.mark.parametrize(
    ("name", "turns", "every", "steps"),
    [("alfworld", 30, 6, 250), ("webshop", 15, 4, 150), ("scienceworld", 30, 6, 250)],
)
def test_a_recipe_of_tcod_holds_the_papers_settings(name: str, turns: int, every: int, steps: int) -> None:
    recipe = read(ROOT / "examples" / "recipes" / f"qwen2.5-3b-tcod-{name}.yaml")
    (method,) = recipe["methods"]
    assert (method["order"], method["start"], method["every"], method["turns"]) == ("f2b", 1, every, turns)
    episodes = recipe["rollout"]["episodes"]
    assert (episodes["turns"], episodes["turn_tokens"], recipe["rollout"]["prompts_per_step"]) == (turns, 512, 16)
    assert (recipe["train"]["steps"], recipe["train"]["learning_rate"]) == (steps, 1e-6)


def test_the_recipe_of_hiper_asks_for_tags_that_critic_and_environment_read() -> None:
    recipe = read(ROOT / "examples" / "recipes" / "qwen2.5-1.5b-hiper-alfworld.yaml")
    _, _, example = recipe["prompts"]["system"].partition("For example:\n")
    found = tagged_of(list(example))
    parts = [example[part] for part in (found.switch, found.subgoal, found.action) if part is not None]
    assert found.switches and "".join(parts) == example.replace("\n", "") and command_of(example) == "go to shelf 1"
    assert [method["name"] for method in recipe["methods"]] == ["hiper_critic"]
    assert recipe["objective"][0]["advantage"] == {"name": "hiper"}
    # Of the released script.
    assert recipe["objective"][1] == {"name": "reference_kl", "weight": 0.01}
    rollout, optimizer = recipe["rollout"], recipe["train"]
    assert (rollout["prompts_per_step"], rollout["episodes"]) == (128, {"turns": 50, "turn_tokens": 512})
    assert (optimizer["steps"], optimizer["learning_rate"], recipe["eval"]["temperature"]) == (150, 1e-6, 0.4)


class Tokenizer:
    """Shows what the chat template was given."""

    def apply_chat_template(self, chat: list[dict[str, str]], **options: Any) -> str:
        return f"<{chat[0]['content']}>{sorted(options.items())}"


def test_the_prompt_files_hold_hard_problems_and_code_with_the_template_applied() -> None:
    script = runpy.run_path(str(ROOT / "examples" / "prepare_prompts.py"))
    problems = [
        {"question": "easy", "final_answer": 1, "difficulty": 5.5},
        {"question": "hard", "final_answer": 2, "difficulty": 6.0},
    ]
    code = [
        {"ability": "math", "prompt": [{"role": "user", "content": "m"}]},
        {"ability": "code", "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]},
    ]
    (hard,), (task,) = list(script["deepmath"](problems)), list(script["eurus_code"](code))
    assert hard[0].startswith("hard\n") and hard[0].endswith("\\boxed{}.") and hard[1] == "2"
    assert task == ("c", None)
    entry = json.loads(script["line"](*task, Tokenizer()))
    (sum_,) = script["gsm8k"]([{"question": "how many?", "answer": "It is 2 * 617 = <<2*617=1234>>1,234.\n#### 1,234"}])
    assert sum_[0].startswith("how many?\n") and sum_[1] == "1234"
    mixed = [{"question": str(level), "final_answer": level, "difficulty": level} for level in (2.5, 3.0, 5.0, 5.5)]
    assert [answer for _, answer in script["deepmath_medium"](mixed)] == ["3.0", "5.0"]
    assert [answer for _, answer in script["math_500"]([{"problem": "p", "answer": "7"}])] == ["7"]
    options = [("add_generation_prompt", True), ("enable_thinking", False), ("tokenize", False)]
    assert entry == {"prompt": f"<c>{options}"}
    assert json.loads(script["line"](*hard, Tokenizer()))["answer"] == "2"


def test_the_recipe_in_the_documentation_of_methods_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        rest = {"run": "x", "model": {"path": "x"}, "prompts": {"task": "addition"}, "teachers": {"endpoints": ["x:1"]}}
        build_plugins(parse_settings(Recipe, {**rest, **yaml.safe_load(block)}))


NAMED = {
    "qwen3-1.7b-opd-vllm": (1, {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144}),
    "qwen3-8b-opd-sharded": (8, {}),
    "qwen3-8b-rlsd": (8, {}),
    "qwen3-8b-sdpo": (8, {}),
}
"""Recipes that name GPUs of 80 GB, how many, and how the student differs from Qwen3-8B."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_a_recipe_fits_the_gpus_that_it_names(name: str, tmp_path: Path) -> None:
    (path,) = (path for path in RECIPES if path.stem == name)
    ranks, other = NAMED[name]
    assert "80 GB" in path.read_text()
    shape = {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12_288, "vocab_size": 151_936} | other
    heads = {"num_attention_heads": shape["hidden_size"] // 128, "num_key_value_heads": 8, "head_dim": 128}
    config = Qwen3Config(**shape, **heads, tie_word_embeddings=bool(other), max_position_embeddings=40_960)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    data = read(path)
    data["model"]["path"] = str(tmp_path)
    recipe = parse_settings(Recipe, data)
    data["rollout"].pop("engine", None)  # vLLM need not be installed to know what the methods need
    needs = build_plugins(parse_settings(Recipe, data)).needs
    model = ModelShape(recipe.model, torch.bfloat16, sharded=recipe.train.sharding == "fsdp")
    gpu = TABLE["h100"]
    check_fits(memory_of(recipe, model, needs, gpu, gpu=True, ranks=ranks), gpu, recipe)
