"""HiPER: tags, the three advantages by hand and against their sums, credit by token, ranks and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from critics import assert_two_ranks_fit_as_one_and_a_checkpoint_keeps_it, step_of
from rows import make_row
from thread_ranks import Meeting

from opd.tasks.verdict import Verdict
from opd.wire.types import ScoreItem, Scores
from opd_zoo.advantages.hiper import Hiper
from opd_zoo.critics.hiper import HiperCritic, HiperCriticSettings, advantages, tagged_of
from student.data.row import Row, RowKey
from student.model.ranks import Ranks
from student.plugin.controllers import begin
from student.rl.advantages.base import AdvantageSettings

WORDS = ["<env>", "<switch>", "SWITCH", "KEEP", "</switch>", "<subgoal>", "door", "</subgoal>", "<action>", "go", "up"]
WORDS += ["</action>", "hm "]
FIRST = ["<switch>", "KEEP", "</switch>", "<subgoal>", "door", "</subgoal>", "<action>", "go", "</action>"]
LAST = ["<switch>", "SWITCH", "</switch>", "<subgoal>", "door", "</subgoal>", "<action>", "up", "</action>"]
KIND = "HiperCritic"


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(WORDS[place] for place in ids)


class Services:
    """States that tell what was read last, and ranks that meet at a barrier."""

    tokenizer = Tokenizer()

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.gather = (ranks or Meeting(1).rank(0)).gather

    def read(self, items: list[ScoreItem], *arguments: Any, **options: Any) -> list[Scores]:
        eye = np.eye(len(WORDS) + 8, dtype=np.float32)
        return [Scores(hidden=eye[np.asarray(item.token_ids)[item.prompt_length - 1 : -1]]) for item in items]


def episode(step: int, sample: int, *turns: list[str], reward: float = 1.0) -> Row:
    """Turns with a token of the environment behind each."""
    ids: list[int] = []
    spans, mask = [], []
    for turn in turns:
        spans.append((len(ids), len(ids) + len(turn)))
        ids += [*(WORDS.index(word) for word in turn), 0]
        mask += [True] * len(turn) + [False]
    return make_row(
        ids,
        key=RowKey(step, "p", sample),
        turns=tuple(spans),
        loss_mask=np.array(mask),
        verdict=Verdict.score(reward),
    )


def rows(step: int) -> list[Row]:
    return [
        episode(step, 0, FIRST, LAST),
        episode(step, 1, FIRST, FIRST, reward=0.0),
        episode(step, 2, LAST, FIRST, LAST),
        episode(step, 3, ["hm "], ["go"], reward=0.0),
    ]


def critic(services: Services | None = None, **settings: Any) -> HiperCritic:
    made = HiperCritic(HiperCriticSettings(name="hiper_critic", **settings))
    begin(made, services or Services())  # type: ignore[arg-type]
    return made


def test_the_advantages_of_two_segments_are_those_of_the_formula_by_hand() -> None:
    settings = HiperCriticSettings(name="hiper_critic", discount=0.5, lam_turn=0.5, lam_segment=0.25)
    rewards, begins = np.array([1.0, 2.0, 4.0]), np.array([True, False, True])
    values = np.array([[0.5, 9.0, 1.5], [0.25, 0.75, 2.0], [1.0, 0.5, 3.0]])
    high, low, term = advantages(rewards, begins, values, settings)
    # low: the first segment ends at turn 1 and looks at V_high(2) = 1.5; the second at nothing.
    last_low = 2 + 0.5 * 1.5 - 0.75
    assert low.tolist() == [1 + 0.5 * 0.75 - 0.25 + 0.25 * last_low, last_low, 4 - 2.0]
    last_high = 4 - 1.5
    assert high.tolist() == [(1 + 0.5 * 2) + 0.25 * 1.5 - 0.5 + 0.25 * 0.25 * last_high, 0.0, last_high]
    assert term.tolist() == [1 + 0.5 * (2 + 0.5 * 1.5) - 1.0, 2 + 0.5 * 1.5 - 0.5, 4 - 3.0]


def test_with_lambdas_of_one_they_are_discounted_sums_less_the_value() -> None:
    rng, gamma = np.random.default_rng(1), 0.9
    settings = HiperCriticSettings(name="hiper_critic", discount=gamma, lam_turn=1.0, lam_segment=1.0)
    rewards, values = rng.normal(size=7), rng.normal(size=(3, 7))
    begins = np.array([True, False, False, True, True, False, False])
    high, low, _ = advantages(rewards, begins, values, settings)
    for t in range(7):
        end = min([*(k for k in range(t + 1, 7) if begins[k]), 7])
        within = sum(gamma ** (k - t) * rewards[k] for k in range(t, end))
        beyond = gamma ** (end - t) * values[0, end] if end < 7 else 0.0
        assert low[t] == pytest.approx(within + beyond - values[1, t], rel=1e-12)
        whole = sum(gamma ** (k - t) * rewards[k] for k in range(t, 7))
        assert high[t] == pytest.approx(whole - values[0, t] if begins[t] else 0.0, rel=1e-12)


def test_tags_are_found_across_tokens_and_missing_ones_keep_and_act() -> None:
    cut = ["<swi", "tch>switch </sw", "itch> <sub", "goal>door</subgoal>", "<action>", "go", "</action>!"]
    found = tagged_of(cut)
    assert (found.switch, found.subgoal, found.action) == (slice(0, 3), slice(2, 4), slice(4, 7))
    assert found.switches and found.low == 4
    bare = tagged_of(["go ", "up"])
    assert (bare.switch, bare.subgoal, bare.action, bare.switches, bare.low) == (None, None, None, False, 0)
    for kept in ("<switch>keep</switch>", "<switch> </switch>", "<switch>SWITCH", "</switch>SWITCH<switch>"):
        assert not tagged_of(list(kept)).switches
    assert tagged_of([]).action is None


def test_each_token_has_the_credit_of_its_part() -> None:
    made = critic(discount=0.5, lam_turn=0.5, lam_segment=0.25)
    made.heads = np.zeros((3, len(WORDS) + 9))
    made.heads[:, -1] = [0.25, 0.5, 0.75]
    (row,) = made.compose([episode(0, 0, FIRST, LAST)])
    at_end = [1 - 0.25, 1 - 0.5, 1 - 0.75]
    before = [0.5 * 0.25 - 0.25 + 0.125 * at_end[0], 0.5 * 0.25 - 0.5, 0.5 * 0.25 - 0.75]
    expected: list[float] = []
    for high, low, term in (before, at_end):
        expected += [term] * 3 + [high] * 3 + [low] * 3 + [0.0]
    found = Hiper(AdvantageSettings(name="hiper")).refine(row, 9.0)
    assert isinstance(found, np.ndarray) and found.tolist() == pytest.approx(expected)
    # A subgoal that is kept is not decided anew, and a turn without tags is an action.
    (kept, bare) = made.compose([episode(0, 1, FIRST, FIRST), episode(0, 2, ["hm "])])
    assert not kept.critic.credit[KIND][13:16].any() and kept.critic.credit[KIND][3:6].all()
    assert bare.critic.credit[KIND].tolist() == [0.5, 0.0]


def test_what_wins_comes_to_be_worth_more_and_metrics_count_the_tags() -> None:
    made = critic(fits=64, learning_rate=0.05)
    told = [step_of(made, step, rows(step)) for step in range(6)]
    assert told[-1]["hiper/loss"] < told[0]["hiper/loss"]
    # States behind a subgoal come before wins and losses, those of turns without tags before losses alone.
    states = np.eye(len(WORDS) + 8)
    subgoal, environment = made.values(states, states)[1, [WORDS.index("</subgoal>"), 0]]
    assert subgoal > 0.5 and abs(environment) < 0.05
    # Nine turns in four episodes, of which two have no tags; one segment each and three turns that switch later on.
    assert told[0]["hiper/segments"] == 6 / 4
    assert (told[0]["hiper/switch_tags"], told[0]["hiper/action_tags"]) == (7 / 9, 7 / 9)
    assert told[0]["hiper/subgoal_tags"] == 5 / 6 and told[0]["hiper/warm_up"] == 0


def test_rows_without_a_reward_are_given_and_teach_nothing() -> None:
    made = critic()
    unknown = make_row(3, verdict=Verdict.unknown("no answer"))
    assert step_of(made, 0, [unknown]) == {} and made.heads is None
    assert not unknown.critic.credit[KIND].any()


def test_two_ranks_fit_what_one_does_to_the_bit_and_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    alone, again = assert_two_ranks_fit_as_one_and_a_checkpoint_keeps_it(
        lambda ranks: critic(Services(ranks)), rows, tmp_path
    )
    np.testing.assert_array_equal(again.moments, alone.moments)  # type: ignore[arg-type]
