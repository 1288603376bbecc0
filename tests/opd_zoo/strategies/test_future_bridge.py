"""FutureBridge: which turn is bridged, which bridges are kept, and what is learnt from one."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from answering import answering
from rows import make_row
from thread_ranks import build, metrics_of, of, together

from opd.errors import ConfigError
from opd.tasks.environments.lock import Lock, LockOptions
from opd.wire.types import PayloadKind, Scores
from opd_lab.tiny.tokenizer import make_tokenizer
from opd_zoo.strategies.future_bridge import BRIDGE, STUDENT_ARM, TEACHER_ARM, worst
from student.data.needs import TEACHER
from student.data.plan import EpisodePlan, PlannedRow, plan_step
from student.data.row import EpisodeTrace, Row
from student.plugin.terms import build_terms
from student.rollout.episodes import EpisodePlayer
from student.rollout.requests import RolloutSpec
from student.settings.episodes import EpisodeSettings

LOCK = Lock(LockOptions(digits=4, turns=6))
TOKENIZER = make_tokenizer()
GAPS = (0.5, 2.0, 1.0, 9.0)
"""log S - log T by turn of a sampled episode; the last is the largest, and may not be bridged."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with answering() as found:
        yield found


def episode(planned: PlannedRow, gaps: Any = GAPS) -> Row:
    """Turns of two tokens with one of the environment between them, `gaps` apart from the teacher."""
    row = make_row(3 * len(gaps) - 1, key=planned.key, prompt=planned.prompt, text=" ".join("abcdefgh"[: len(gaps)]))
    row.prompt_ids = np.array(TOKENIZER("12", add_special_tokens=False)["input_ids"], np.uint32)
    row.turns = tuple((3 * k, 3 * k + 2) for k in range(len(gaps)))
    row.tags = {"ended": "turns"}
    own = np.arange(row.length) % 3 < 2
    row.loss_mask, row.episode = own, EpisodeTrace(~own)
    taught = np.full(row.length, np.nan, np.float32)
    for gap, (start, end) in zip(gaps, row.turns, strict=True):
        taught[start:end] = row.behaviour_logp[start:end] - gap
    row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=taught)
    return row


class Played:
    """Episodes of four turns; after a bridge the teacher likes three turns of `taught`, after the student two."""

    def __init__(self, taught: tuple[float, ...] = (-1.0, -1.0, -1.0), own: tuple[float, ...] = (-1.0, -1.0, 1.0)):
        self.shares = {TEACHER_ARM: taught, STUDENT_ARM: own}
        self.planned: list[PlannedRow] = []

    def __call__(self, planned: PlannedRow) -> Row:
        self.planned.append(planned)
        if planned.key.agent == BRIDGE:
            return make_row(3, key=planned.key, prompt=planned.prompt, origin="expert")
        return episode(planned, self.shares.get(planned.key.agent, GAPS))


def bridged(address: str, played: Played, ranks: int = 1, **settings: Any) -> tuple[list[Row], Any]:
    made = build("future_bridge", teacher={"endpoint": address, "model": "m"}, **settings)
    parts = together(ranks, lambda: made, played, plan=of(2), groups=2)
    return [row for rows, _, _ in parts for row in rows], parts


def test_the_worst_turn_is_that_of_the_largest_mean_gap_and_never_the_last() -> None:
    (planned,) = of(1)([LOCK.draw(Random(0))]).rows
    assert worst(episode(planned)) == 1
    assert worst(episode(planned, (0.5,))) is None
    row = episode(planned)
    row.trained = False
    assert worst(row) is None
    row = episode(planned)
    row.signals[TEACHER, PayloadKind.TOPK] = row.signals.pop((TEACHER, PayloadKind.SAMPLED))
    assert worst(row) == 1  # a payload that carries the sampled tokens too is asked alone
    row.signals.clear()
    assert worst(row) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bridge_is_kept_where_the_student_goes_on_better_after_it(address: str, ranks: int) -> None:
    played = Played()
    rows, parts = bridged(address, played, ranks)
    assert [row.key.agent for row in rows].count("") == 4 and [row.key.agent for row in rows].count(BRIDGE) == 4
    plans = {one.key.agent: one.episode for one in played.planned if one.key.sample == 0}
    own, taught, bridge = plans[STUDENT_ARM], plans[TEACHER_ARM], plans[BRIDGE]
    assert own is not None and taught is not None and bridge is not None
    assert own.replay == ("a", "b") and own.turns == taught.turns == 3
    assert taught.replay == ("a", taught.replay[1]) and taught.replay[1] != "b"
    assert bridge == EpisodePlan(replay=taught.replay, given=True, passed_over=(0,))
    found = metrics_of(parts[0][1])
    assert found["future_bridge/gain"] == pytest.approx(1 / 3)
    assert found["future_bridge/asked_share"] == found["future_bridge/kept_share"] == 1


@pytest.mark.parametrize(
    "shares",
    [
        {"taught": (-1.0, -1.0, 1.0)},  # no better
        {"taught": (-1.0, -1.0)},  # it ended before the last of the turns
        {"own": (-1.0, -1.0)},
    ],
    ids=str,
)
def test_a_bridge_that_shows_nothing_is_dropped(address: str, shares: Any) -> None:
    rows, parts = bridged(address, Played(**shares))
    assert [row.key.agent for row in rows] == [""] * 4
    assert metrics_of(parts[0][1])["future_bridge/kept_share"] == 0


def test_a_teacher_that_does_not_answer_costs_the_bridges_alone() -> None:
    rows, parts = bridged("http://127.0.0.1:9", Played())
    assert len(rows) == 4 and metrics_of(parts[0][1])["future_bridge/asked_share"] == 0


def test_objectives_that_cannot_learn_from_bridges_are_refused() -> None:
    made = build("future_bridge", teacher={"endpoint": "http://h", "model": "m"})
    recipe: Any = None
    for payload in ("gather", "sampled"):
        with pytest.raises(ConfigError, match="payload to hidden or topk"):
            made.check(recipe, build_terms([{"name": "opd", "payload": payload}]))
    assert made.traits.gives_rows == ("all", "expert")
    made.check(recipe, build_terms([{"name": "opd", "payload": "hidden"}]))
    made.check(recipe, build_terms([{"name": "opd", "rows": "sampled"}, {"name": "sft", "rows": "expert"}]))


def test_of_a_played_bridge_the_bridge_alone_is_learnt_from() -> None:
    spec = RolloutSpec(seed=3, batch_rows=8, candidates=0, valid_vocab=len(TOKENIZER), max_prompt_tokens=64)
    player = EpisodePlayer(EpisodeSettings(turn_tokens=4, isolation="none"), TOKENIZER, spec)
    prompt = LOCK.draw(Random(0))
    (planned,) = plan_step(1, [prompt], samples=1, max_new_tokens=80, temperature=1.0).rows
    made = build("future_bridge", teacher={"endpoint": "http://h", "model": "m"})
    one = made._bridge(planned, ["0", "1", "2"], 2, prompt.extra["path"][2])
    (row,) = player.play([one], lambda rows, names: [], purpose=("rollout",), on_row=lambda row: None)
    assert row.origin == "expert" and len(row.turns) == 1 and row.key.agent == BRIDGE
    ((start, end),) = row.turns
    assert TOKENIZER.decode(row.response_ids[start:end], skip_special_tokens=True) == prompt.extra["path"][2]
    assert np.flatnonzero(row.loss_mask).tolist() == list(range(start, end)) and start > 4
