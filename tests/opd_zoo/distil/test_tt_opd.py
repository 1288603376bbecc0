"""TT-OPD: what the flip does, and that a mechanism which does nothing ends the run by its name."""

from typing import Any

import numpy as np
import pytest
import torch

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.verdict import Verdict
from opd_zoo.distil.tt_opd import TtOpd
from student.data.report import StepReport
from student.plugin.terms import build_terms
from student.settings.recipe import Recipe

CONTEXTS = {"ema": {"prompt": "{{ prompt }} {% if row.correct %}Right.{% else %}Wrong.{% endif %}"}}


def term(**settings: Any) -> TtOpd:
    (made,) = build_terms([{"name": "tt_opd", **settings}])
    assert isinstance(made, TtOpd)
    return made


def checked(contexts: dict[str, Any], **settings: Any) -> TtOpd:
    data = {
        "run": "unused",
        "model": {"path": "unused"},
        "prompts": {"task": "lock"},
        "objective": [{"name": "tt_opd", **settings}],
        "contexts": contexts,
        "train": {"steps": 50},
    }
    made = term(**settings)
    made.check(parse_settings(Recipe, data), [made])
    return made


def test_the_divergence_of_failed_episodes_is_raised_and_that_of_others_lowered(toy: Any) -> None:
    made = toy()  # every second row is right
    plain, flipped = (term(flip_failed=flip).token_losses(made.batch()) for flip in (False, True))
    assert plain.loss is not None and flipped.loss is not None
    right = made.batch().of_rows([row.verdict.value == 1.0 for row in made.rows])
    torch.testing.assert_close(flipped.loss, torch.where(right, plain.loss, -plain.loss))
    assert flipped.metrics["tt_flipped"] == (2.0, 4.0) and "tt_flipped" not in plain.metrics
    assert term().settings.weight == 4.0 and term().settings.role == "ema"


def test_an_episode_whose_reward_is_unknown_has_not_failed(toy: Any) -> None:
    made = toy()
    for row in made.rows:
        row.verdict = Verdict.unknown("nobody could be asked")
    plain, flipped = (term(flip_failed=flip).token_losses(made.batch()) for flip in (False, True))
    torch.testing.assert_close(flipped.loss, plain.loss)
    assert flipped.metrics["tt_flipped"] == (0.0, 4.0)


def test_hints_and_tokens_beyond_the_first_turns_are_counted(toy: Any) -> None:
    made = toy(masked=False)
    made.rows[0].contexts["ema"] = np.array([1, 1, 5], np.uint32)
    made.rows[1].contexts["ema"] = made.rows[1].prompt_ids.copy()  # a context that changes nothing
    made.rows[2].turns = ((0, 2), (3, 5))
    metrics = term(first_turns=1).token_losses(made.batch()).metrics
    assert metrics["tt_hinted"] == (1.0, 4.0) and metrics["tt_cut"] == (3.0, 13.0)


GOOD = {"tt_hinted": 0.5, "tt_cut": 0.2, "ema_distance": 0.1, "ema_moved": 1.0}


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({}, None),
        ({"tt_hinted": 0.0}, "hint: no row's teacher read anything but the student's prompt; check contexts.ema"),
        ({"tt_cut": 0.0}, "cut: no episode had a trained token beyond its first 2 turns"),
        ({"ema_moved": 0.0}, "average: the average did not move"),
        ({"ema_distance": 0.0}, "average: the average did not move"),
    ],
)
def test_a_mechanism_that_changes_no_tensor_ends_the_run_by_its_name(
    missing: dict[str, float], said: str | None
) -> None:
    made = checked(CONTEXTS, first_turns=2, within=3)
    for step in range(2):
        made.observe(StepReport(step, GOOD | missing, []))
    fresh = checked(CONTEXTS, first_turns=2, within=3)
    fresh.load_state_dict(made.state_dict())
    for each in (made, fresh):  # also after a resume
        if said is None:
            each.observe(StepReport(2, {}, []))
            continue
        with pytest.raises(ConfigError, match=said):
            each.observe(StepReport(2, GOOD | missing, []))


def test_what_was_not_asked_for_need_not_act() -> None:
    executed = checked({}, role="initial", flip_failed=True, score="entropy", retention=0.5, within=1)
    executed.observe(StepReport(0, {}, []))
    with pytest.raises(ConfigError, match="payload hidden"):
        term(flip_failed=True, payload="hidden")
