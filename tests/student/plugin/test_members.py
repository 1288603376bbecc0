"""What the author of a plug-in has to know: the public members of each kind's base class, at most 15."""

import pytest

from student.plugin.base import Plugin
from student.plugin.controllers import Controller
from student.plugin.strategy import Strategy
from student.plugin.terms import Term
from student.rl.advantages.base import Advantage
from student.rl.losses.policy_gradient import PolicyGradient
from student.rollout.engine import RolloutEngine
from student.scoring.rewards.base import Reward

MOST = 15
FACTS = {"settings_type", "evidence", "extras"}
"""Read from the class's brackets, by the catalogue and before a run; none is a hook."""
OF_ALL = "needs traits check check_prompts remarks observe state_dict load_state_dict"
OWN: dict[type[Plugin], str] = {
    Term: "token_losses bind module selects stratum assess prepare",
    Controller: "check_model start plan compose updates after_update finished",
    Strategy: "run",
    Advantage: "check_chain bind estimate groups refine shape",
    Reward: "kind by_group bounds reward fire close",
    RolloutEngine: "open sync pack sample rest take close",
}

FURTHER: dict[type[Plugin], str] = {
    PolicyGradient: "surrogate compared denominator credit lacks bounds of_ratio unread"
}
"""What a base class within a kind adds to that kind's members."""


def members(kind: type[Plugin]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - FACTS


def test_all_kinds_share_the_members_of_their_base() -> None:
    assert members(Plugin) == set(OF_ALL.split())


@pytest.mark.parametrize("kind", OWN, ids=lambda kind: kind.__name__)
def test_an_author_has_at_most_fifteen_members_of_a_kind_to_know(kind: type[Plugin]) -> None:
    assert members(kind) == {*OF_ALL.split(), *OWN[kind].split()}
    assert len(members(kind)) <= MOST


@pytest.mark.parametrize("base", FURTHER, ids=lambda base: base.__name__)
def test_a_base_within_a_kind_adds_few_members_to_it(base: type[Plugin]) -> None:
    (kind,) = (kind for kind in OWN if issubclass(base, kind))
    assert members(base) - members(kind) == set(FURTHER[base].split())
    assert len(FURTHER[base].split()) <= MOST
