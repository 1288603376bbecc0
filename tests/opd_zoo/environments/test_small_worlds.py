"""Bandits, routed questions and judged pairs: what each turn shows and pays."""

import math
from random import Random
from typing import Any

import pytest
from judge_servers import serving

from opd.config import parse_settings
from opd.errors import DataError
from opd.tasks.environments import Observation
from opd.tasks.prompt import Prompt
from opd_zoo.environments.bandit import Bandit, ucb
from opd_zoo.environments.preference import Preference
from opd_zoo.environments.router import Router


def test_ucb_tries_every_arm_and_then_the_highest_bound() -> None:
    pays = ["10", "110101", "00"]
    found = ucb(pays, 6, 1.0)
    assert found[:3] == [0, 1, 2]
    counts, sums = [1, 1, 1], [1, 1, 0]
    for turn, arm in enumerate(found[3:], 3):
        bounds = [sums[i] / counts[i] + math.sqrt(math.log(turn) / counts[i]) for i in range(3)]
        assert arm == bounds.index(max(bounds))
        sums[arm] += int(pays[arm][counts[arm]])
        counts[arm] += 1


@pytest.mark.parametrize("seed", range(20))
def test_the_path_of_a_bandit_is_played_and_earns_more_than_chance(seed: int) -> None:
    world = Bandit(parse_settings(Bandit.Options, {"turns": 40, "gap": 0.5}))
    prompt = world.draw(Random(seed))
    earned = [play(world, prompt, actions)[1] for actions in (prompt.extra["path"], ["A", "B", "C"] * 14)]
    last, total = play(world, prompt, prompt.extra["path"])
    assert last.done and last.success and total == pytest.approx(earned[0]) and earned[0] > earned[1]
    assert play(world, prompt, prompt.extra["path"])[1] == total  # equal actions have equal results


def play(world: Bandit, prompt: Prompt, actions: list[str]) -> tuple[Observation, float]:
    world.reset(prompt, 0)
    total = 0.0
    for action in actions[: world.options.turns]:
        seen = world.step(action)
        total += seen.reward or 0.0
    return seen, total


def test_what_names_no_arm_pays_nothing_and_costs_a_turn() -> None:
    world = Bandit(parse_settings(Bandit.Options, {"turns": 2}))
    prompt = world.draw(Random(1))
    world.reset(prompt, 0)
    first, second = world.step("Z"), world.step("")
    assert "nothing and got 0" in first.text and first.reward == second.reward == 0.0
    assert second.done and second.success is False


PAIR = Prompt.make("Which?", extra={"chosen": "good {b}", "rejected": "bad"})


def judged(seed: int, first: str, second: str, **options: Any) -> tuple[str, Observation]:
    world = Preference(parse_settings(Preference.Options, options))
    shown = world.reset(PAIR, seed).text
    right = "A" if shown.index("good {b}") < shown.index("bad") else "B"
    between = world.step(first)
    assert not between.done and between.reward is None
    return right, world.step(second.replace("RIGHT", right).replace("WRONG", "AB"["BA".index(right)]))


def test_the_better_answer_is_paid_only_after_two_turns_in_the_form() -> None:
    seen = {judged(seed, "Focus: facts", "So \\boxed{RIGHT}")[0] for seed in range(8)}
    assert seen == {"A", "B"}  # a place is no clue
    for first, second, reward in (
        ("Focus: facts", "So \\boxed{RIGHT}.", 1.0),
        ("Focus: facts", "So \\boxed{WRONG}", -0.5),
        ("no form", "So \\boxed{RIGHT}", -0.5),
        ("Focus: facts", "\\boxed{RIGHT} or not", -0.5),
    ):
        _, last = judged(3, first, second, miss=-0.5)
        assert last.done and last.reward == reward and last.success == (reward == 1.0)
    world = Preference(parse_settings(Preference.Options, {}))
    assert world.reset(PAIR, 5).text == world.reset(PAIR, 5).text
    with pytest.raises(DataError, match="rejected"):
        world.reset(Prompt.make("q", extra={"chosen": "a"}), 0)


def test_a_router_asks_named_models_and_saves_by_asking_few() -> None:
    with serving() as server:
        server.say = lambda path, body: (
            400 if body["model"] == "broken" else {"choices": [{"message": {"content": f"{body['model']} says 7"}}]}
        )
        model = {"endpoint": f"{server.url}/v1", "attempts": 1}
        models = {
            "small": {**model, "model": "s", "price": 1},
            "large": {**model, "model": "l", "price": 4},
            "down": {**model, "model": "broken", "price": 9},
        }
        world = Router(parse_settings(Router.Options, {"models": models, "turns": 3, "alpha": 0.25}))
        prompt = Prompt.make("3+4=", answer="7")

        def end(*actions: str) -> Observation:
            assert "small, large, down" in world.reset(prompt, 0).text
            seen = [world.step(action) for action in actions]
            assert [one.done for one in seen] == [False] * (len(seen) - 1) + [True]
            return seen[-1]

        world.reset(prompt, 0)
        assert world.step("I ask. <ask>large: 3+4?</ask>").text == "\n<said>l says 7</said>\n"
        assert world.step("<ask>down: 3+4?</ask>").text == "\n<said>down is unavailable.</said>\n"
        assert end("<answer>7</answer>").reward == 1.0
        assert end("<ask>large: 3+4?</ask>", "<answer>7</answer>").reward == pytest.approx(0.75 + 0.25 * (1 - 4 / 18))
        assert end("<ask>small: a</ask>", "<ask>small: a</ask>", "<answer>7</answer>").reward == pytest.approx(
            0.75 + 0.25 * (1 - 2 / 18)
        )
        assert end("<answer>8</answer>").reward == 0.0
        assert end("7").reward == end("<ask>huge: 3+4?</ask>").reward == -1.0
        assert end(*["<ask>small: a</ask>"] * 3).reward == -1.0  # the last turn must answer
        world.close()
