"""What every registered method and objective owes in a whole run: tests that a new one inherits by being registered.

A method shows that it fired, gives the same when a step is taken again, keeps its state over a resume, and does on two
ranks what it does on one. Samplers have tests of their own in tests/opd_zoo/samplers. Of objectives, whose other
duties stand in tests/student/methods, all learn together here: what each loss is on two ranks shows by itself.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from registered import registered
from run_records import records
from safetensors.torch import load_file
from simulated_world import TOOLS
from slow_cases import slow

from student.job.session import train
from student.plugin.controllers import CONTROLLERS
from student.plugin.terms import OBJECTIVES
from student.settings.recipe import Recipe
from tests.support.answering import answering

CONSTANT = {"name": "opd", "payload": "topk", "k": 8, "aggregation": "constant"}
PLAIN: dict[str, Any] = {
    "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
    "train": {"steps": 3, "checkpoint_every": 0, "micro_batch_tokens": 128},
    "eval": {"prompts": 0},
    "objective": [CONSTANT],
}
METHODS: dict[str, dict[str, Any]] = {
    "expert_rows": {"share": 0.5},
    "adwin": {"windows": [2, 4], "rows": 8, "folds": 2, "delay": 1, "null_every": 0, "rho": 0.3},
    "fixed_window": {"tokens": 6},
    "first_n": {"tokens": 6},
    "staircase": {"first": 3, "rise": 3, "every": 1},
    "linear_window": {"first": 3},
    "prune_opd": {"k": 8, "threshold": 0.6, "smoothing": 2, "shortest": 2, "quantile": 0.5},
    "effective_length": {
        "first": 6,
        "period": 2,
        "repeated": 1,
        "rounds": 1,
        "confirmed": 0,
        "shortest": 2,
        "growth": 1.0,
    },
    "effopd": {
        "tries": 2,
        "gate": {"kind": "reverse_kl", "prompts": 4, "gain": 0.0, "length_tolerance": 9, "truncation_tolerance": 1},
    },
    "tcod": {"order": "f2b", "every": 1, "turns": 3},
    "update_sparsity": {"every": 1},
    "routing_replay": {"source": "rollout"},
    "mask_tokens": {"tokens": {"ids": list(range(4, 60))}},
    "token_budget": {"tokens": 10_000},
    "turnopd": {"probe_every": 2, "probes": 2, "shortest": 1, "longest": 3},
    "episode_filter": {"ended": ["tokens"]},
    "sopd": {"teacher": {"model": "m", "max_tokens": 4}},
    "sage": {"judge": {"model": "m"}},
    "roll_in": {"teacher": {"model": "m", "max_tokens": 4}, "share": 0.9},
    "rltf": {"floor": -50.0},
}
"""Settings with which a method acts within three steps on hardly trained models."""
EPISODES: dict[str, Any] = {
    "prompts": {"task": "lock", "options": {"digits": 3, "turns": 5}},
    "rollout": {
        **PLAIN["rollout"],
        "max_new_tokens": 40,
        "episodes": {"turns": 5, "turn_tokens": 3, "isolation": "none"},
    },
}
TRIES: dict[str, Any] = {"prompts": {"task": "student_plugins:TwoTries", "options": {"digits": 1}}}
"""Episodes that hardly trained models sometimes win."""
ANSWERING = "http://answering"
"""Stands in prompts for the address of the server here."""
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("tcod", "turnopd", "prefix_replay"), EPISODES),
    # Answers of 16 tokens: the limit ends some episodes, and the lock others.
    "episode_filter": {**EPISODES, "rollout": {**EPISODES["rollout"], "max_new_tokens": 16}},
    "sopd": {**EPISODES, "objective": [{"name": "sft", "aggregation": "sequence_mean"}]},
    "rltf": {
        **EPISODES,
        **TRIES,
        "objective": [
            {"name": "policy_gradient", "rows": "expert", "ratio": "none", "advantage": {"name": "reinforce"}}
        ],
    },
    "prs": {**EPISODES, "prompts": {"task": "student_plugins:Measured", "options": {"digits": 1}}},
    "sage": {**EPISODES, "objective": [{"name": "sage_opd", "k": 8}]},
    "g2rl": {"prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}}, "objective": [{"name": "grpo"}]},
    "seeupo": {
        **EPISODES,
        **TRIES,
        "objective": [{"name": "gspo", "ratio_to": "old", "advantage": {"name": "lite_ppo"}}],
    },
    "trustee": {
        **EPISODES,
        "prompts": {
            "task": "simulated",
            "options": {"simulator": {"endpoint": ANSWERING, "model": "m"}, "tools": {"sums": TOOLS["sums"][1:]}},
        },
        "rollout": {**EPISODES["rollout"], "max_new_tokens": 60, "max_prompt_tokens": 440},
        "objective": [{"name": "grpo"}],
        "rewards": [{"name": "trustee"}],
    },
    "critic": {
        "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
        "objective": [{"name": "ppo"}],
    },
    "archer_critic": {
        **EPISODES,
        "objective": [{"name": "policy_gradient", "ratio": "none", "advantage": {"name": "archer"}}],
    },
    "hiper_critic": {**EPISODES, "objective": [{"name": "policy_gradient", "advantage": {"name": "hiper"}}]},
    "modes": {
        "modes": {
            "long": {"budget": 12, "prefix": "L", "teacher": "teacher"},
            "short": {"budget": 6, "prefix": "S", "teacher": "student"},
        },
    },
}
NAMES = {e.name for e in CONTROLLERS if not e.path.startswith("opd_zoo.samplers.")}
SLOW = ["critic", "first_n", "linear_window", "modes", "staircase"]
"""Windows that depend on the step alone, as fixed_window does, which stands for them in every run."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with answering() as url:
        yield url


@pytest.fixture
def recipe_of(make_recipe: Callable[..., Recipe], tmp_path: Path, address: str, experts: Path) -> Callable[..., Recipe]:
    """A recipe with one method, in a run folder of its own; who is asked in words is a server here."""

    def make(name: str, run: str, **more: Any) -> Recipe:
        settings = dict(METHODS.get(name, {}))
        settings |= {who: {**settings[who], "endpoint": address} for who in ("teacher", "judge") if who in settings}
        if name == "routing_replay":
            more["model"] = {"path": str(experts)}
        changes = {**PLAIN, **CHANGES.get(name, {}), **more, "methods": [{"name": name, **settings}]}
        changes = json.loads(json.dumps(changes).replace(ANSWERING, address))
        return make_recipe(run=str(tmp_path / f"{name}-{run}"), **changes)

    return make


WITHOUT: dict[str, set[str]] = {}
"""Metrics of runs without a method, by what else is in their recipes: most methods share one."""


def metrics_without(recipe: Recipe) -> set[str]:
    # What asks for a critic or for given rows is refused without the method that brings them.
    refused = any(
        t.get("advantage", {}).get("name") in ("archer", "hiper")
        or t["name"] in ("ppo", "sft")
        or t.get("rows") == "expert"
        for t in recipe.objective
    )
    objective = [{"name": "grpo"}] if refused else recipe.objective
    plain = recipe.model_copy(update={"methods": [], "objective": objective, "run": recipe.run.with_name("without")})
    key = plain.model_dump_json(exclude={"run", "model", "teachers"})
    if key not in WITHOUT:
        train(plain)
        WITHOUT[key] = set().union(*records(plain))
    return WITHOUT[key]


@pytest.mark.parametrize(
    "name", [*(one for one in registered(CONTROLLERS) if one.id in NAMES.difference(SLOW)), *slow(*SLOW)]
)
def test_a_method_shows_that_it_fired_and_a_step_taken_again_gives_the_same(
    recipe_of: Callable[..., Recipe],
    name: str,
    interrupted: Callable[..., dict[str, Any]],
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    calm, cut = recipe_of(name, "calm"), recipe_of(name, "cut")
    straight = train(calm)
    own = {key for key in set().union(*records(calm)) if not key.startswith(("cost/", "loss/"))} - metrics_without(calm)
    fired = [key for key in own if any(line.get(key) for line in records(calm))]
    assert fired, f"a run with {name} has no metric of its own that is not 0; let it show that it acted"
    # Between the updates of a step nothing is interrupted: the first stop is before those of the second step.
    resumed = interrupted(cut, update=1 + int(records(calm)[0]["updates"])) if name == "seeupo" else interrupted(cut)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(straight["checkpoint"]))
    assert records(cut) == records(calm)


def all_objectives() -> list[dict[str, Any]]:
    """Every registered term once: on the rows that the student sampled, or on given ones where it learns from those."""
    rows = {name: OBJECTIVES.load(name).settings_type.model_fields["rows"].default for name in known_terms()}
    return [{"name": name, "rows": "sampled" if default == "all" else default} for name, default in rows.items()]


def known_terms() -> list[str]:
    return [entry.name for entry in OBJECTIVES]


@pytest.mark.slow
def test_two_ranks_do_what_one_does(
    recipe_of: Callable[..., Recipe], make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    # What the terms need, and what only looks, in the run of the terms; each other method in one of its own.
    with_terms = [{"name": "expert_rows", "share": 0.25}, {"name": "critic"}, {"name": "update_sparsity", "every": 1}]
    alone = [name for name in sorted(NAMES) if name not in {method["name"] for method in with_terms}]
    terms = {
        "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 3, "samples_per_prompt": 4},
        "teachers": {"reference": "initial"},
        "objective": all_objectives(),
        "methods": with_terms,
        "train": {"steps": 2, "minibatches": 2, "checkpoint_every": 0, "micro_batch_tokens": 128},
        "eval": {"prompts": 0},
    }
    short = {"train": {**PLAIN["train"], "steps": 2}}
    ones = {name: recipe_of(name, "one", **short) for name in alone}
    ones["terms"] = make_recipe(run=str(tmp_path / "terms-one"), **terms)
    for recipe in ones.values():
        train(recipe)
    twos = {name: one.model_copy(update={"run": one.run.with_name(f"{name}-two")}) for name, one in ones.items()}
    two_ranks(*twos.values())
    assert {f"loss/{name}" for name in known_terms()} <= set(records(ones["terms"])[0])
    assert "update_sparsity" in records(ones["terms"])[1]
    apart = []
    for name, two in twos.items():
        for mine, theirs in zip(records(ones[name]), records(two), strict=True):
            apart += [f"{name}: only one has {key}" for key in set(mine) ^ set(theirs)]
            apart += [
                f"{name}: {key} is {mine[key]} on one rank, {theirs[key]} on two"
                for key in set(mine) & set(theirs)
                if theirs[key] != pytest.approx(mine[key], rel=2e-3, abs=1e-4)
            ]
        last = f"checkpoints/step-{two.train.steps:06d}/model/model.safetensors"
        found, expected = load_file(two.run / last), load_file(ones[name].run / last)
        close = all(torch.allclose(found[key], tensor, atol=3e-4, rtol=2e-3) for key, tensor in expected.items())
        apart += [] if close else [f"{name}: the weights differ"]
    assert not apart, "\n".join(apart)
