"""What a step of pairs is made of, and what of a set of drive."""

import numpy as np
import pytest

from opd.config import parse_settings
from opd.tasks.prompt import Prompt
from opd_zoo.samplers.drive import Drive, DriveSettings
from opd_zoo.samplers.pairing import Pairing, PairingSettings
from student.data.plan import plan_step

PLAN = plan_step(0, [Prompt.make("p")], samples=1, max_new_tokens=1, temperature=1.0)


def chosen(rates: dict[str, float | None], count: int, explore: float) -> dict[str, float]:
    """The texts that are chosen of a pool, with their gains."""
    method = Pairing(parse_settings(PairingSettings, {"name": "positive_negative", "explore": explore}))
    pool = {text: Prompt.make(text) for text in rates}
    method.rates.known = {pool[text].uid: rate for text, rate in rates.items() if rate is not None}
    found = method.choose(list(pool.values()), count, np.random.default_rng(0), PLAN)
    assert len(found) == min(count, len(pool)) == len({prompt.uid for prompt, _ in found})
    return {str(prompt.text): gain for prompt, gain in found}


RATED = {"hard": 0.1, "less hard": 0.3, "middle": 0.5, "less easy": 0.7, "easy": 0.9}


@pytest.mark.parametrize(
    ("new", "count", "explore", "pairs"),
    [
        (4, 4, 0.5, {"hard", "easy"}),
        (4, 4, 0.3, {"hard", "easy"}),  # rounded up
        (1, 5, 1.0, {"hard", "less hard", "less easy", "easy"}),  # there is no second new one
        (4, 3, 0.0, {"hard", "less hard", "easy"}),  # the odd place is a hard prompt's
        (4, 1, 0.0, {"hard"}),
        (4, 4, 1.0, set()),
    ],
)
def test_new_prompts_take_their_share_and_pairs_the_rest(new: int, count: int, explore: float, pairs: set[str]) -> None:
    fresh = {f"new {i}": None for i in range(new)}
    found = set(chosen({**RATED, **fresh, "never": 0.0, "always": 1.0}, count, explore))
    assert found & RATED.keys() == pairs and len(found & fresh.keys()) == count - len(pairs)


def test_what_is_always_right_or_wrong_comes_where_nothing_else_is_left() -> None:
    assert chosen({"hard": 0.1, "never": 0.0, "always": 1.0, "new": None}, 2, 0.0).keys() == {"hard", "new"}
    assert chosen({"hard": 0.1, "never": 0.0, "always": 1.0}, 3, 0.0).keys() == {"hard", "never", "always"}


def test_the_gain_is_the_distance_from_one_half_above_the_pools() -> None:
    found = chosen({"hard": 0.1, "less easy": 0.7, "new": None}, 3, 0.5)
    assert found == pytest.approx({"hard": 0.4 - 0.2, "less easy": 0.2 - 0.2, "new": -0.2})


def test_a_set_comes_first_in_any_order_then_the_hardest_and_the_unknown_last() -> None:
    method = Drive(parse_settings(DriveSettings, {"name": "drive", "phases": [{"step": 1, "keep": 0.5}]}))
    kept, other, hard, easy, new = (Prompt.make(text) for text in ("kept", "other", "hard", "easy", "new"))
    assert method.scores([easy, new, hard], np.random.default_rng(0)) == [0.0, -1.0, -2.0]  # as they come
    method.rates.known = {kept.uid: 0.9, other.uid: 0.0, hard.uid: 0.2, easy.uid: 0.8}
    method.kept = [kept.uid, other.uid]
    firsts = set()
    for seed in range(20):
        pool = [new, easy, kept, hard, other]
        scores = method.scores(pool, np.random.default_rng(seed))
        order = [prompt.text for _, prompt in sorted(zip(scores, pool, strict=True), key=lambda pair: -pair[0])]
        assert set(order[:2]) == {"kept", "other"} and order[2:] == ["hard", "easy", "new"]
        firsts.add(order[0])
    assert firsts == {"kept", "other"}
