"""GAE's numbers, and a critic that learns what states are worth, the same on two ranks as on one."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import make_row
from run_records import metrics_of
from saved_state import save_state
from thread_ranks import Meeting

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.verdict import Verdict
from opd.wire.types import Scores
from student.data.row import CriticValues, Row, RowKey
from student.job.plugins import build_plugins
from student.job.session import train
from student.model.ranks import Ranks
from student.plugin.controllers import begin
from student.rl.advantages.gae import credit_of, returns_of
from student.rl.critic import Critic, CriticSettings
from student.settings.recipe import Recipe
from student.state.state_io import load_state

WIDTH = 3


def row(index: int, reward: float, values: list[float] | None = None, mask: list[bool] | None = None) -> Row:
    length = len(values or mask or [0, 0, 0, 0])
    return make_row(
        length,
        key=RowKey(0, f"p{index}", 0),
        loss_mask=np.array(mask or [True] * length),
        verdict=Verdict.score(reward),
        critic=CriticValues(None if values is None else np.array(values, np.float32)),
    )


def test_credit_is_the_discounted_sum_of_surprises() -> None:
    values = [0.2, 0.5, 0.4]
    found = credit_of(row(0, 1.0, values), 1.0, 0.9, 0.8)
    deltas = [0.9 * 0.5 - 0.2, 0.9 * 0.4 - 0.5, 1.0 - 0.4]
    expected = [deltas[0] + 0.72 * deltas[1] + 0.72**2 * deltas[2], deltas[1] + 0.72 * deltas[2], deltas[2]]
    assert found.tolist() == pytest.approx(expected)
    whole = credit_of(row(0, 1.0, values), 1.0, 1.0, 1.0)
    assert whole.tolist() == pytest.approx([1.0 - v for v in values])
    assert returns_of(row(0, 1.0, values), whole).tolist() == pytest.approx([1.0] * 3)
    assert credit_of(row(0, 1.0), 1.0, 0.5, 1.0).tolist() == [0.125, 0.25, 0.5, 1.0]


def test_what_the_environment_wrote_is_passed_over() -> None:
    made = row(0, 1.0, [0.2, 9.0, 0.4], [True, False, True])
    plain = credit_of(row(0, 1.0, [0.2, 0.4]), 1.0, 0.9, 0.8)
    assert credit_of(made, 1.0, 0.9, 0.8).tolist() == pytest.approx([plain[0], 0.0, plain[1]])
    made.token_rewards = np.array([0.5, 7.0, 0.0], np.float32)
    assert credit_of(made, 1.0, 1.0, 1.0)[0] == pytest.approx(1.5 - 0.2)


class Services:
    """Features that tell the reward of a row, and ranks that meet at a barrier."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.gather = (ranks or Meeting(1).rank(0)).gather

    def read(self, rows: list[Row], *arguments: Any, **options: Any) -> list[Scores]:
        found = []
        for one in rows:
            value = one.verdict.value if one.verdict is not None else 0.0
            noise = np.random.default_rng(int(one.key.uid[1:])).normal(size=(one.length, WIDTH)) * 0.1
            noise[:, 0] += 2.0 * value - 1.0
            found.append(Scores(hidden=noise.astype(np.float32)))
        return found


def critic(services: Services, **settings: Any) -> Critic:
    made = Critic(CriticSettings(name="critic", **settings))
    begin(made, services)  # type: ignore[arg-type]
    return made


def fit(made: Critic, step: int) -> dict[str, float]:
    """The updates of a step, and what follows them."""
    services: Any = made.services
    assert list(made.updates([], services)) == []
    return made.after_update(step, services)


def rows(step: int) -> list[Row]:
    return [row(10 * step + i, float(i % 2)) for i in range(6)]


@pytest.mark.parametrize("heads", [1, 2])
def test_values_come_to_tell_good_states_from_bad_ones(heads: int) -> None:
    services = Services()
    made = critic(services, heads=heads, learning_rate=0.02)
    assert not made.value(np.ones((4, WIDTH), np.float32)).any()
    losses = []
    for step in range(12):
        made.compose(rows(step))
        losses.append(fit(made, step)["critic_loss"])
    good, bad = ([np.mean(r.critic.values) for r in made.compose(rows(99))[i::2]] for i in (1, 0))
    assert losses[-1] < 0.3 * losses[0] and min(good) > 0.6 > 0.4 > max(bad)


def test_several_heads_meet_between_their_least_and_their_mean() -> None:
    made = critic(Services(), heads=2, softness=0.3)
    made.heads = np.array([[0.0, 0.0, 0.0, 0.2], [0.0, 0.0, 0.0, 0.8]])
    (value,) = made.value(np.ones((1, WIDTH), np.float32))
    assert value == pytest.approx(-0.3 * np.log((np.exp(-0.2 / 0.3) + np.exp(-0.8 / 0.3)) / 2))
    assert 0.2 < value < 0.5


@pytest.mark.parametrize("softness", [0.0, 0.3])
def test_the_loss_is_that_of_the_values_that_are_used(softness: float) -> None:
    made = critic(Services(), heads=2, softness=softness)
    made.heads, made.moments = np.array([[0.0, 0.0, 0.0, 0.2], [0.0, 0.0, 0.0, 0.8]]), np.zeros((2, 2, WIDTH + 1))
    (one,) = made.compose([row(0, 1.0)])
    assert one.critic.values is not None
    value = float(one.critic.values[0])
    returns = returns_of(one, credit_of(one, 1.0, 1.0, 0.95))
    assert fit(made, 0)["critic_loss"] == pytest.approx(float(np.mean((value - returns) ** 2)), rel=1e-6)


def test_a_critic_can_stay_as_it_is_from_a_step_on() -> None:
    services = Services()
    made, kept = critic(services, fits_until=2), []
    for step in range(4):
        made.compose(rows(step))
        fit(made, step)
        kept.append(made.heads.copy())
    assert not np.array_equal(kept[0], kept[1]) and np.array_equal(kept[1], kept[3])


def test_two_ranks_fit_what_one_does_and_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    alone = critic(Services())
    meeting = Meeting(2)
    pair = [critic(Services(meeting.rank(index))) for index in range(2)]

    def work(index: int) -> None:
        for step in range(3):
            pair[index].compose(rows(step)[index::2])
            fit(pair[index], step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    for step in range(3):
        alone.compose(rows(step))
        fit(alone, step)
    np.testing.assert_allclose(pair[0].heads, alone.heads, rtol=1e-9)
    np.testing.assert_array_equal(pair[0].heads, pair[1].heads)
    save_state(tmp_path, "critic", alone.state_dict())
    again = critic(Services())
    again.load_state_dict(load_state(tmp_path, "critic"))
    for one in (alone, again):
        one.compose(rows(5))
        fit(one, 5)
    np.testing.assert_array_equal(again.heads, alone.heads)


def recipe(**changes: Any) -> Recipe:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "student_plugins:Digits", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 6, "max_prompt_tokens": 32},
        "objective": [{"name": "ppo"}],
        "methods": [{"name": "critic", "warm_up": 2}],
        "train": {"steps": 4, "minibatches": 2, "learning_rate": 1e-3, "threads": 1},
        "eval": {"prompts": 0},
        **changes,
    }
    return parse_settings(Recipe, data)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": []}, "add critic to methods"),
        ({"objective": [{"name": "grpo"}]}, "reads the values of a critic"),
        ({"objective": [{"name": "ppo", "advantage": [{"name": "gae"}, {"name": "outliers"}]}]}, "credit by token"),
    ],
)
def test_a_critic_and_gae_need_each_other(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_plugins(recipe(**changes))
    build_plugins(recipe())
    build_plugins(recipe(objective=[{"name": "policy_gradient", "advantage": {"name": "prompt_value"}}]))


def test_ppo_learns_after_its_warm_up(world: Path, tmp_path: Path) -> None:
    made = recipe(run=str(tmp_path / "run"), model={"path": str(world / "student")})
    train(made)
    lines = metrics_of(made.run)
    assert [line["critic_warm_up"] for line in lines] == [1, 1, 0, 0]
    assert [line["updates"] for line in lines] == [0, 0, 2, 2]
    assert lines[-1]["critic_loss"] < lines[0]["critic_loss"] and lines[-1]["grad_norm"] > 0
    saved = json.loads((made.run / "checkpoints/step-000004/trainer/loop.json").read_text())
    assert saved["methods"]["critic"]["moved"] == 64
