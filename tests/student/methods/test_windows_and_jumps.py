"""ADWIN, its rivals and EffOPD in the loop, against a real server."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import metrics_of, records
from safetensors.torch import load_file
from slow_cases import slow

from opd.config import parse_settings
from opd.errors import ConfigError
from student.job.plugins import build_plugins
from student.job.session import train
from student.settings.recipe import Recipe

Make = Callable[..., Recipe]
TERM = {"name": "opd", "payload": "hidden", "aggregation": "constant"}
ADWIN = {"name": "adwin", "windows": [2, 4], "rows": 8, "folds": 2, "delay": 2, "null_every": 2, "rho": 0.3}


WAITING = {**ADWIN, "background": False}


def recipes_in(folder: Path, world: Path, teacher: Any) -> Make:
    def recipe(name: str, *methods: dict[str, Any], steps: int = 6, **changes: Any) -> Recipe:
        data = {
            "run": str(folder / name),
            "model": {"path": str(world / "student")},
            "teachers": {"endpoints": [teacher.address], "default": "teacher"},
            "prompts": {"task": "addition", "options": {"digits": 2}},
            "rollout": {"prompts_per_step": 8, "max_new_tokens": 8, "max_prompt_tokens": 32},
            "objective": [TERM],
            "methods": list(methods),
            "train": {
                "steps": steps,
                "learning_rate": 3e-3,
                "checkpoint_every": 1,
                "keep_checkpoints": 9,
                "threads": 1,
            },
            "eval": {"prompts": 0},
        }
        return parse_settings(Recipe, {**data, **changes})

    return recipe


@pytest.fixture
def make(world: Path, teacher: Any, tmp_path: Path) -> Make:
    return recipes_in(tmp_path, world, teacher)


@pytest.fixture(scope="module")
def calm(world: Path, teacher: Any, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Recipe of a run of six steps with these methods that has been made, once for all tests that look at it."""
    recipe_of, made = recipes_in(tmp_path_factory.mktemp("calm"), world, teacher), {}

    def run(*methods: dict[str, Any]) -> Recipe:
        if (key := json.dumps(methods)) not in made:
            made[key] = recipe_of(f"run-{len(made)}", *methods)
            train(made[key])
        return made[key]

    return run


def checkpoint(recipe: Recipe, step: int = 6) -> Path:
    return recipe.run / "checkpoints" / f"step-{step:06d}"


def model_at(recipe: Recipe, step: int) -> dict[str, torch.Tensor]:
    return load_file(checkpoint(recipe, step) / "model" / "model.safetensors")


def weights_of(folder: Path) -> dict[str, str]:
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.rglob("*.safetensors")
    }


@pytest.mark.parametrize("background", [True, *slow(False)])
def test_a_run_cut_while_a_probe_is_under_way_resumes_bit_for_bit(make: Make, calm: Make, background: bool) -> None:
    method = ADWIN if background else WAITING
    train(make("cut", method, steps=1))
    # After 1 and after 3 steps adwin has a probe under way.
    for steps in (3, 6):
        train(make("cut", method, steps=steps), resume=True)
    assert weights_of(checkpoint(make("cut"))) == weights_of(checkpoint(calm(method)))
    assert records(make("cut")) == records(calm(method))


def test_adwin_acts_after_the_delay_and_counts_its_probes(calm: Make) -> None:
    steps = metrics_of(calm(ADWIN).run)
    acted = [line["step"] for line in steps if "adwin/next_window" in line]
    assert acted == [3, 5]
    assert [line["window"] for line in steps[:3]] == [8, 8, 8]
    assert steps[3]["window"] == steps[2]["adwin/next_window"]
    for line in steps[:3]:
        assert "adwin/at_longest_share" not in line, "no probe has acted yet"
    for name, bound in (("longest", 8.0), ("shortest", 2.0)):
        assert steps[3][f"adwin/at_{name}_share"] == float(steps[3]["window"] == bound)
    assert max(line["response_length"] for line in steps[3:5]) <= max(steps[3]["window"], steps[4]["window"])
    for line in steps:
        probed = "adwin/next_window" in line
        assert (line.get("cost/probe/sampled_tokens", 0) > 0) == probed
        assert (line.get("cost/probe/gradient_positions", 0) > line.get("cost/probe/decoded_positions", 0)) == probed
    assert steps[2]["adwin/published_8"] == pytest.approx(1.0)
    assert -1 <= steps[2]["adwin/published_2"] <= steps[2]["adwin/published_8"]
    assert "adwin/null_2" in steps[2] and "adwin/null_2" not in steps[4]


def test_cheaper_metrics_give_nearly_the_same_cosines(make: Make, calm: Make) -> None:
    found = {"full": metrics_of(calm(ADWIN).run)[2]["adwin/published_4"]}
    for metric in ("sketch", "last_layers"):
        recipe = make(metric, {**ADWIN, "metric": metric}, steps=3)
        train(recipe)
        found[metric] = metrics_of(recipe.run)[2]["adwin/published_4"]
    assert found["sketch"] == pytest.approx(found["full"], abs=0.03)
    assert found["last_layers"] == pytest.approx(found["full"], abs=0.35)


def test_domains_get_windows_of_their_own(make: Make) -> None:
    mix = {"mix": [{"task": t, "options": {"digits": 2}} for t in ("addition", "subtraction")]}
    recipe = make("domains", {**ADWIN, "per_domain": True}, steps=3, prompts=mix)
    train(recipe)
    assert {"adwin/next_window/addition", "adwin/next_window/subtraction"} <= set(metrics_of(recipe.run)[2])


@pytest.mark.parametrize(
    ("method", "lengths"),
    [
        ({"name": "fixed_window", "fraction": 0.5}, [4, 4, 4, 4]),
        ({"name": "staircase", "first": 2, "rise": 3, "every": 2}, [2, 2, 5, 5]),
        *slow(
            ({"name": "fixed_window", "tokens": 3}, [3, 3, 3, 3]),
            ({"name": "first_n", "tokens": 100}, [8, 8, 8, 8]),
            ({"name": "linear_window", "first": 2, "until": 0.5}, [2, 5, 8, 8]),
        ),
    ],
    ids=lambda v: "" if isinstance(v, list) else v["name"],
)
def test_schedules_cut_the_rollouts(make: Make, method: dict[str, Any], lengths: list[int]) -> None:
    recipe = make("schedule", method, steps=4)
    train(recipe)
    for line, limit in zip(metrics_of(recipe.run), lengths, strict=True):
        assert line["window"] == limit
        assert line["response_length"] <= limit


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_windows_refuse_other_aggregations(make: Make, aggregation: str) -> None:
    recipe = make("refused", ADWIN, objective=[{**TERM, "aggregation": aggregation}])
    with pytest.raises(ConfigError, match="needs aggregation constant"):
        build_plugins(recipe)


def test_windows_refuse_terms_that_look_ahead(make: Make) -> None:
    recipe = make("refused", ADWIN, objective=[{**TERM, "payload": "sampled", "discount": 0.9}])
    with pytest.raises(ConfigError, match="discount: 0"):
        build_plugins(recipe)


@pytest.mark.parametrize("name", ["tip", "reopold"])
def test_windows_refuse_terms_that_rank_the_tokens_of_a_response(make: Make, name: str) -> None:
    recipe = make("refused", ADWIN, objective=[{"name": name, "aggregation": "constant"}])
    with pytest.raises(ConfigError, match=r"ranks .* whole response"):
        build_plugins(recipe)


def test_adwin_refuses_candidates_that_are_all_too_long(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"shorter than rollout\.max_new_tokens"):
        build_plugins(make("refused", {"name": "adwin"}))


def test_a_refused_jump_leaves_the_run_as_if_there_were_no_searches(make: Make, calm: Make) -> None:
    never = {"name": "effopd", "tries": 3, "gate": {"kind": "reverse_kl", "prompts": 4, "gain": 0.999}}
    recipe = make("with", never, steps=3)
    train(recipe)
    one, two = model_at(recipe, 3), model_at(calm(), 3)
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert metrics_of(recipe.run)[0]["effopd/tried"] == 1


def test_jumps_move_attention_and_mlp_by_the_stated_factor(make: Make, calm: Make, world: Path) -> None:
    always = {
        "name": "effopd",
        "tries": 2,
        "gate": {"kind": "accuracy", "prompts": 4, "strict": False},
        "moments": "reset",
    }
    jumped = make("jumped", always, steps=1)
    train(jumped)
    one, two = model_at(jumped, 1), model_at(calm(), 1)
    start = load_file(world / "student" / "model.safetensors")
    line = metrics_of(jumped.run)[0]
    factor = line["effopd/displacement"]
    assert factor == 5.0 and line["effopd/accepted"] == 2 and line["cost/gate/sampled_tokens"] > 0
    moved = {name for name in one if not torch.equal(one[name], two[name])}
    assert moved == {n for n in one if (".self_attn." in n or ".mlp." in n) and "norm" not in n}
    for name in moved:
        torch.testing.assert_close(one[name] - start[name], factor * (two[name] - start[name]), rtol=1e-3, atol=1e-6)
    learner = load_file(checkpoint(jumped, 1) / "trainer" / "learner.safetensors")
    still = {key for key, value in learner.items() if key.endswith("exp_avg") and not value.any()}
    assert {key.split("/")[2] for key in still} == moved


def test_searches_come_at_powers_of_two(make: Make) -> None:
    recipe = make("powers", {"name": "effopd", "tries": 1, "gate": {"prompts": 4}}, steps=5)
    train(recipe)
    assert [line["step"] for line in metrics_of(recipe.run) if "effopd/tried" in line] == [1, 2, 4]


def test_a_probe_beside_training_does_not_disturb_it(make: Make, calm: Make) -> None:
    """With windows that are never admissible, ADWIN only watches."""
    watching = make("watching", {**ADWIN, "rho": 0.999999}, steps=4)
    train(watching)
    one, two = model_at(watching, 4), model_at(calm(), 4)
    assert metrics_of(watching.run)[2]["cost/probe/sampled_tokens"] > 0
    assert all(torch.equal(one[name], two[name]) for name in two)


def test_a_probe_in_the_foreground_finds_the_same(calm: Make) -> None:
    one, two = metrics_of(calm(ADWIN).run), metrics_of(calm(WAITING).run)
    cosines = {key: value for key, value in one[2].items() if key.startswith("adwin/")}
    assert len(cosines) > 6 and cosines == {key: two[2][key] for key in cosines}


def test_prune_opd_cuts_where_the_top_k_sets_part(make: Make) -> None:
    recipe = make(
        "prune", {"name": "prune_opd", "k": 8, "threshold": 0.6, "smoothing": 2, "shortest": 2, "quantile": 0.5}
    )
    train(recipe)
    steps = metrics_of(recipe.run)
    assert steps[0]["window"] == 8 and steps[0]["pruned_tokens"] > 0 and 0 < steps[0]["overlap"] < 1
    assert min(line["window"] for line in steps) < 8
    assert all(line["response_length"] <= line["window"] for line in steps)
