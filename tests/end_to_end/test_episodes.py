"""Episodes through the whole loop with a real teacher: sampled, scored, learnt from, resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_records import metrics_of
from safetensors.torch import load_file
from slow_cases import slow

from student.job.session import train
from student.settings.recipe import Recipe

LOCK: dict[str, Any] = {
    "prompts": {"task": "lock", "options": {"digits": 3, "turns": 5}},
    "rollout": {
        "prompts_per_step": 6,
        "max_new_tokens": 40,
        "episodes": {"turns": 5, "turn_tokens": 3, "isolation": "none"},
    },
    "eval": {"prompts": 4},
}

HISTORIES: dict[str, dict[str, Any]] = {
    "whole": {},
    "one turn": {"history": 1},
    "summaries": {
        "history": "summary",
        "summary": {"context_tokens": 20, "tokens": 4, "most": 3, "instruction": "sum"},
    },
}


def played_with(history: str, **changes: Any) -> dict[str, Any]:
    """Settings of a rollout."""
    episodes = LOCK["rollout"]["episodes"] | HISTORIES[history]
    return LOCK["rollout"] | {"max_prompt_tokens": 8, "max_new_tokens": 60, "episodes": episodes, **changes}


def test_episodes_with_summaries_are_played_ahead_and_read_as_they_were_written(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    engine = {"name": "transformers", "mismatch_rows": 4, "mismatch_limit": 1e-3}
    objective = [{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}]
    train_ = {"steps": 3, "max_staleness": 1, "learning_rate": 1e-2}
    changes = LOCK | {
        "rollout": played_with("summaries", engine=engine),
        "objective": objective,
        "train": train_,
        "methods": [{"name": "tcod", "order": "fixed", "start": 0}],
    }
    recipe = make_recipe(**changes, run=str(tmp_path / "run"))
    train(recipe)
    found = metrics_of(recipe.run)
    assert [line["staleness"] for line in found] == [0, 1, 1]
    # The weights that sampled give every token the log-prob that it was sampled with, each in its own window.
    assert all(line["summaries"] > 0 and line["mismatch/log_ratio"] < 1e-4 for line in found)
    assert [line["importance_weight"] == pytest.approx(1.0, abs=1e-5) for line in found] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("order", ["f2b", "b2f"])
def test_a_curriculum_of_turns_runs_and_resumes_to_the_same_weights(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]], order: str
) -> None:
    changes = LOCK | {"methods": [{"name": "tcod", "order": order, "every": 1, "turns": 3}], "eval": {"prompts": 8}}
    calm_recipe = make_recipe(**changes, run=str(tmp_path / "calm"))
    calm = train(calm_recipe)
    train(make_recipe(**changes, run=str(tmp_path / "cut"), train={"steps": 2}))
    resumed = train(make_recipe(**changes, run=str(tmp_path / "cut")), resume=True)
    assert hashes(Path(calm["checkpoint"])) == hashes(Path(resumed["checkpoint"]))
    found = metrics_of(calm_recipe.run)
    assert [line["turn_depth"] for line in found] == [1, 2, 3, 3]
    if order == "f2b":
        assert [line["turns"] for line in found] == [1, 2, 3, 3]
        assert all(f"kl_by_turn/{depth}" in line for depth, line in zip((1, 2, 3, 3), found, strict=True))
    else:
        assert "kl_by_turn/3" in found[0] and "kl_by_turn/1" not in found[0]
    assert all(line["episodes_broken"] == 0 and line["reverse_kl"] > 0 for line in found)
    assert calm["before"]["accuracy"] is not None


@pytest.mark.parametrize("payload", ["gather", *slow("hidden")])
def test_teachers_are_asked_for_the_students_tokens_alone_and_it_learns_the_same(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    payload: str,
) -> None:
    objective = [{"name": "opd", "payload": payload} | ({"k": 8} if payload == "gather" else {})]
    rollout = LOCK["rollout"] | {"max_new_tokens": 90, "episodes": LOCK["rollout"]["episodes"] | {"turns": 10}}
    prompts = {"task": "lock", "options": {"digits": 6, "turns": 10}}
    changes = {"prompts": prompts, "rollout": rollout, "objective": objective, "eval": {"every": 0, "prompts": 1}}
    changes |= {"methods": [{"name": "tcod", "order": "fixed", "start": 0}]}  # for metric `turns`
    found = {}
    for name in ("parts", "wholes"):
        recipe = make_recipe(**changes, run=str(tmp_path / name), train={"steps": 2})
        found[name] = (hashes(Path(train(recipe)["checkpoint"])), metrics_of(recipe.run))
        monkeypatch.setattr("student.data.row.spans_of", lambda mask: ())
    assert found["parts"][0] == found["wholes"][0]
    for part, whole in zip(found["parts"][1], found["wholes"][1], strict=True):
        assert part["turns"] == 10 and part["unasked_share"] > 0.2 and "unasked_share" not in whole
        saved = 1 - part["payload_bytes"] / whole["payload_bytes"]
        assert saved == pytest.approx(part["unasked_share"], abs=0.02)
        assert part["loss/opd"] == whole["loss/opd"]


def test_student_and_teacher_read_the_last_turns_alone_where_the_history_is_short(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    engine = {"name": "transformers", "mismatch_rows": 6}
    rollout = LOCK["rollout"] | {"episodes": LOCK["rollout"]["episodes"] | {"history": 2}, "engine": engine}
    found = []
    for history in (2, None):
        rollout["episodes"] = LOCK["rollout"]["episodes"] | {"history": history}
        recipe = make_recipe(**LOCK | {"rollout": rollout}, run=str(tmp_path / str(history)), train={"steps": 2})
        train(recipe)
        found.append(metrics_of(recipe.run))
    for short, whole in zip(*found, strict=True):
        # Read again as it is trained, what was sampled has the log-probs that it was sampled with.
        assert short["mismatch/max_log_ratio"] < 1e-4
        assert short["episode_windows"] > 2 and "episode_windows" not in whole
        assert short["cost/train/teacher_positions"] > whole["cost/train/teacher_positions"]
        assert short["reverse_kl"] > 0


def test_summaries_are_sampled_scored_and_learnt_from_like_any_turn(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    rollout = played_with("summaries", engine={"name": "transformers", "mismatch_rows": 6})
    changes = LOCK | {"rollout": rollout, "methods": [{"name": "tcod", "order": "fixed", "start": 0}]}
    recipe = make_recipe(**changes, run=str(tmp_path / "run"), train={"steps": 2})
    first = load_file(Path(recipe.model.path) / "model.safetensors")
    last = load_file(Path(train(recipe)["checkpoint"]) / "model" / "model.safetensors")
    assert any(not torch.equal(last[name], tensor) for name, tensor in first.items())
    for line in metrics_of(recipe.run):
        # Read again as it is trained, what was sampled has the log-probs that it was sampled with.
        assert line["mismatch/max_log_ratio"] < 1e-4
        assert 0 < line["summaries"] <= 3 and 0 <= line["summaries_cut"] <= 1 and line["context_saved"] > 0
        assert line["episode_windows"] > 1 and line["summary_kl"] != 0 and line["reverse_kl"] > 0


def test_episodes_that_outgrew_their_summaries_are_left_out_of_the_loss(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    rollout = played_with("summaries")
    rollout["episodes"]["summary"] = rollout["episodes"]["summary"] | {"most": 1}
    changes = LOCK | {"rollout": rollout, "methods": [{"name": "episode_filter", "ended": ["context"]}]}
    recipe = make_recipe(**changes | {"eval": {"prompts": 0}}, run=str(tmp_path / "run"), train={"steps": 1})
    train(recipe)
    (line,) = metrics_of(recipe.run)
    assert line["episodes_filtered"] > 0 and line["summaries"] > 0


@pytest.mark.slow
def test_episodes_in_processes_give_the_run_that_they_give_in_process(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    found = []
    for isolation in ("none", "process"):
        rollout = LOCK["rollout"] | {"episodes": LOCK["rollout"]["episodes"] | {"isolation": isolation}}
        recipe = make_recipe(**LOCK | {"rollout": rollout}, run=str(tmp_path / isolation), train={"steps": 2})
        found.append(hashes(Path(train(recipe)["checkpoint"])))
    assert found[0] == found[1]


@pytest.mark.slow
def test_an_environment_that_goes_wrong_costs_its_episodes_and_not_the_run_in_process_or_not(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    found, shares = [], []
    unruly = {"task": "tests.support.environments:Unruly", "options": {"digits": 3, "turns": 5}}
    for isolation in ("none", "process"):
        rollout = LOCK["rollout"] | {"episodes": LOCK["rollout"]["episodes"] | {"isolation": isolation}}
        objective = [{"name": "opd", "payload": "gather", "k": 8}, {"name": "grpo"}]
        rollout |= {"prompts_per_step": 4, "samples_per_prompt": 2}
        changes = {"prompts": unruly, "rollout": rollout, "objective": objective, "train": {"steps": 3}}
        recipe = make_recipe(**LOCK | changes, run=str(tmp_path / isolation))
        found.append(hashes(Path(train(recipe)["checkpoint"])))
        shares.append([line["episodes_broken"] for line in metrics_of(recipe.run)])
    assert found[0] == found[1] and shares[0] == shares[1]
    assert all(0 < share < 1 for share in shares[0]), shares


@pytest.mark.slow
def test_a_run_whose_every_episode_breaks_ends_with_the_weights_it_began_with(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> None:
    useless = {"task": "tests.support.environments:Useless", "options": {"digits": 3, "turns": 5}}
    recipe = make_recipe(**LOCK | {"prompts": useless}, run=str(tmp_path / "run"), train={"steps": 2})
    checkpoint = Path(train(recipe)["checkpoint"])
    assert all(line["episodes_broken"] == 1 and line["updates_skipped"] == 1 for line in metrics_of(recipe.run))
    began = load_file(Path(recipe.model.path) / "model.safetensors")
    ended = load_file(checkpoint / "model" / "model.safetensors")
    assert all(torch.equal(ended[name], tensor) for name, tensor in began.items())


@pytest.mark.slow
@pytest.mark.parametrize("history", HISTORIES)
def test_a_run_that_is_killed_inside_an_episode_resumes_to_the_same_weights(
    killed_and_resumed: Callable[..., Recipe], history: str
) -> None:
    changes = {"rollout": played_with(history), "eval": LOCK["eval"], "train": {"steps": 3}}
    killed_and_resumed("DeadlyLock", {"digits": 3, "turns": 5}, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("history", HISTORIES)
def test_two_ranks_play_and_learn_as_one_does(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[[Recipe], None], history: str
) -> None:
    rollout = played_with(history, prompts_per_step=3, samples_per_prompt=2)
    changes = LOCK | {
        "rollout": rollout,
        "objective": [{"name": "opd", "payload": "gather", "k": 8}, {"name": "grpo"}],
        "methods": [{"name": "tcod", "adaptive": True, "multiple": 5.0}],
        "train": {"steps": 3, "micro_batch_tokens": 64},
    }
    one, two = (make_recipe(**changes, run=str(tmp_path / name)) for name in ("one", "two"))
    train(one)
    two_ranks(two)
    for mine, theirs in zip(metrics_of(one.run), metrics_of(two.run), strict=True):
        for name in ("turn_depth", "turns", "episode_kl", "loss/opd", "reverse_kl", "response_tokens", "reward"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
    weights = [load_file(r.run / "checkpoints" / "step-000003" / "model" / "model.safetensors") for r in (one, two)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=1e-3)
