"""One of two ranks (gloo) fails where the other gathers weights or gradients: both end with its error, at once."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
from checkpoints import assert_same, state_of
from waiting import wait_until

from opd.errors import ConfigError
from student.run.checkpoint import latest_checkpoint
from student.settings.recipe import Recipe

FSDP = {"sharding": "fsdp", "micro_batch_tokens": 64}
# The average is read in process: its forwards gather weights, after the rollout and within what the ranks agree on.
LOCAL: dict[str, Any] = {
    "objective": [{"name": "opd", "payload": "gather", "k": 8}, {"name": "reference_kl", "weight": 0.1}],
    "teachers": {"reference": "ema", "ema": {"decay": 0.5}},
    "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2},
    "eval": {"prompts": 0},
}
FAILS = {
    # At another temperature an evaluation samples twice, and gathers the weights each time.
    "eval": {"eval": {"prompts": 3, "temperature": 0.7}},
    "rollout": {},
    "stops": {},
}
LOST = 21


def test_ranks_end_together_when_one_fails_and_save_together(
    make_recipe: Callable[..., Recipe], two_ranks: Callable[..., list[forked.Program]], tmp_path: Path
) -> None:
    recipes = []
    for place, changes in FAILS.items():
        engine = {"name": "student_plugins:FailingEngine", "at": place, "call": 2 if place == "rollout" else 1}
        rollout = LOCAL["rollout"] | {"engine": engine}
        common = LOCAL | {"run": str(tmp_path / place), "rollout": rollout, "train": FSDP | {"steps": 3}}
        recipes.append(make_recipe(**common | changes))
    for sharding in ("fsdp", "none"):  # in a method's own code, where nothing is exchanged
        train = FSDP | {"steps": 3, "sharding": sharding, "checkpoint_every": 0}
        methods = [{"name": "student_plugins:FailsToCompose"}]
        recipes.append(make_recipe(**LOCAL, run=str(tmp_path / f"compose_{sharding}"), methods=methods, train=train))
    # One after the other in the same processes: no collective of the one before is left half-way.
    first, second = (
        dict(re.findall(r"^(\w+): (.*)", rank.output()[0], re.MULTILINE))
        for rank in two_ranks(*recipes, "--say-errors")
    )
    for place in FAILS:
        reason = f"the engine lost its memory in {place!r}; start it again"
        assert second[place].startswith(f"{reason}. The run stopped after")
        assert first[place].startswith("stopped after")
    for place in ("rollout", "compose_fsdp", "compose_none"):
        saved = f"saved in {tmp_path / place / 'checkpoints' / 'step-000001'}; continue with --resume."
        assert first[place].endswith(saved) and second[place].endswith(saved)
    assert second["compose_fsdp"].startswith("a row of this rank is broken; drop it. The run stopped after 1 of 3")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "none"])
def test_an_error_between_collectives_of_torch_ends_the_other_rank_with_its_name(
    make_recipe: Callable[..., Recipe], start_ranks: Callable[..., list[forked.Program]], sharding: str
) -> None:
    recipe = make_recipe(
        objective=[{"name": "student_plugins:FailsOnRank1"}],
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2},
        eval={"prompts": 0},
        train=FSDP | {"sharding": sharding, "checkpoint_every": 1},
    )
    first, second = start_ranks(recipe)
    assert (second.wait(240), first.wait(240)) == (16, LOST)
    assert "error: a row of this rank is broken; drop it." in second.output()[1]
    assert "error: rank 1 ended: a row of this rank is broken; drop it; the run continues from" in first.output()[1]
    assert [path.name for path in (recipe.run / "checkpoints").glob("step-*")] == ["step-000001"]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "none"])
def test_a_rank_that_is_killed_among_rollouts_ahead_ends_the_other_and_the_run_goes_on_to_the_same_bits(
    make_recipe: Callable[..., Recipe],
    start_ranks: Callable[..., list[forked.Program]],
    two_ranks: Callable[..., list[forked.Program]],
    tmp_path: Path,
    sharding: str,
) -> None:
    def recipe(name: str, steps: int) -> Recipe:
        return make_recipe(
            run=str(tmp_path / name),
            objective=[{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}],
            rollout={"prompts_per_step": 3, "samples_per_prompt": 2},
            eval={"prompts": 0},
            train=FSDP | {"sharding": sharding, "steps": steps, "max_staleness": 2},
        )

    endless = recipe("cut", 100_000)
    first, second = start_ranks(endless)
    third = endless.run / "checkpoints" / "step-000003"
    wait_until(lambda: third.exists() or first.poll() is not None or second.poll() is not None, 600)
    second.kill()
    assert (second.wait(240), first.wait(240)) == (-9, LOST)  # a collective would wait for 600 s
    assert "error: rank 1 ended: it reported no error, so it was killed" in first.output()[1]
    last = latest_checkpoint(endless.run / "checkpoints")
    assert last is not None
    steps = int(last.name[5:]) + 2
    calm, cut = recipe("calm", steps), recipe("cut", steps)
    two_ranks(calm, cut)
    mine, theirs = (state_of(one.run / "checkpoints" / f"step-{steps:06d}") for one in (calm, cut))
    assert_same(mine, theirs)
    assert any(name.startswith("ahead/") for name in state_of(last))  # weights of steps under way, sampled again


def test_a_rank_that_fails_before_anything_is_loaded_ends_the_other_with_its_error(
    make_recipe: Callable[..., Recipe], start_ranks: Callable[..., list[forked.Program]]
) -> None:
    recipe = make_recipe(methods=[{"name": "student_plugins:FailsToStart"}], train={"rank_patience": 240})
    first, second = start_ranks(recipe)
    codes = (first.wait(200), second.wait(200))
    assert codes == (ConfigError.exit_code, LOST), second.output()[1]
    assert "error: rank 0 ended: this rank lacks what the method needs" in second.output()[1]
