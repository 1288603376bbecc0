"""SeeUPO: updates in reverse order of turns, and the product that corrects earlier ones."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd.wire.types import Scores
from opd_zoo.updates.seeupo import SeeUpo, SeeUpoSettings
from student.data.row import Row, RowKey
from student.job.plugins import build_plugins
from student.learning.updates import Update
from student.settings.recipe import Recipe

PROMPT = Prompt.make("x")


def row(sample: int, *turns: tuple[int, int]) -> Row:
    length = turns[-1][1] if turns else 3
    mask = np.zeros(length, np.bool_)
    for start, end in turns or ((0, 3),):
        mask[start:end] = True
    return Row(
        key=RowKey(0, PROMPT.uid, sample),
        prompt=PROMPT,
        prompt_ids=np.ones(1, np.uint32),
        response_ids=np.ones(length, np.uint32),
        behaviour_logp=np.zeros(length, np.float32),
        policy_version=np.zeros(length, np.int32),
        loss_mask=mask,
        truncated=False,
        text="",
        turns=turns,
        weight=2.0,
    )


@dataclass
class Services:
    """Reads log-probs that each update of the test moves by `gain` nats a token."""

    gain: float = 0.0
    level: float = 0.0
    reads: list[int] = field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def read(self, rows: Any, *arguments: Any, **options: Any) -> list[Scores]:
        self.reads.append(len(rows))
        return [Scores(sampled=np.full(row.length, self.level, np.float32)) for row in rows]


def method() -> SeeUpo:
    return SeeUpo(parse_settings(SeeUpoSettings, {"name": "seeupo"}))


def test_the_last_turn_is_updated_first_and_earlier_ones_weigh_by_what_moved_behind_them() -> None:
    rows = (row(0, (0, 2), (3, 5), (6, 8)), row(1, (0, 1)))
    services, seeupo = Services(gain=float(np.log(1.5))), method()
    seen = []
    for update in seeupo.updates([Update(rows)], services):  # type: ignore[arg-type]
        seen.append([(r.key.sample, r.loss_mask.nonzero()[0].tolist(), r.weight) for r in update.rows])
        assert update.recompute
        services.level += services.gain
    # s = 1.5 is clipped to 1.2, and so is the product.
    assert seen == [
        [(0, [6, 7], 2.0)],
        [(0, [3, 4], pytest.approx(2.4))],
        [(0, [0, 1], pytest.approx(2.4)), (1, [0], 2.0)],
    ]
    assert [r.weight for r in rows] == [2.0, 2.0] and rows[0].loss_mask.sum() == 6 and rows[1].loss_mask.sum() == 1
    again = method()
    again.load_state_dict(seeupo.state_dict())  # a run that was stopped here tells the same
    found = again.after_update(0, services)  # type: ignore[arg-type]
    assert found == {"turn_updates": 3.0, "turn_ratio_product": pytest.approx(1.2)}


def test_the_product_stays_between_its_bounds() -> None:
    seeupo = method()
    assert seeupo.product(1.0, 1.5) == pytest.approx(1.2) and seeupo.product(1.2, 0.5) == pytest.approx(0.96)
    assert seeupo.product(1.1, 1.05) == pytest.approx(1.155)


def test_single_turns_get_the_update_they_had() -> None:
    rows = (row(0), row(1))
    (update,) = list(method().updates([Update(rows)], Services()))  # type: ignore[arg-type]
    assert update.rows == rows and all(r.weight == 2.0 and r.loss_mask.all() for r in rows)


def test_an_update_that_fails_leaves_masks_and_weights_as_they_were() -> None:
    rows = (row(0, (0, 2), (3, 5)),)
    updates = method().updates([Update(rows)], Services())  # type: ignore[arg-type]
    next(iter(updates))
    updates.close()  # type: ignore[attr-defined]
    assert rows[0].loss_mask.sum() == 4 and rows[0].weight == 2.0


def test_terms_without_old_log_probs_are_refused() -> None:
    def build(**term: Any) -> None:
        data = {
            "run": "run",
            "model": {"path": "student"},
            "prompts": {"task": "lock"},
            "objective": [{"name": "gspo", "advantage": {"name": "lite_ppo"}, **term}],
            "methods": [{"name": "seeupo"}],
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 64},
            "train": {"steps": 1, "learning_rate": 1e-3},
        }
        build_plugins(parse_settings(Recipe, data))

    build(ratio_to="old")
    with pytest.raises(ConfigError, match="ratio_to: old"):
        build()
