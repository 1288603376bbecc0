"""What a served model must fit before the first step."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError, IncompatibleTeacherError
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from opd_lab.tiny.tokenizer import make_tokenizer
from student.commands.dry_run import check
from student.data.needs import Needs, SignalNeed
from student.scoring.handshake import _check_vocabulary, longest_prompt
from student.settings.recipe import Recipe

USUAL = (512, "rollout.max_prompt_tokens")


@pytest.mark.parametrize(
    ("contexts", "roles", "longest"),
    [
        ({}, {"teacher", "reference"}, USUAL),
        # A model that reads a long hint as teacher and a short one as reference reads the long one too, and the other
        # way round.
        ({"teacher": 900, "reference": 64}, {"teacher", "reference"}, (900, "contexts.teacher.max_tokens")),
        ({"teacher": 64, "reference": 900}, {"teacher", "reference"}, (900, "contexts.reference.max_tokens")),
        ({"teacher": 64}, {"teacher", "reference"}, USUAL),
        ({"teacher": 64}, {"teacher"}, (64, "contexts.teacher.max_tokens")),
        ({"teacher": None}, {"teacher"}, USUAL),
        ({"teacher": 64, "t": 900}, {"teacher"}, (900, "contexts.t.max_tokens")),
        ({"teacher": 900, "t": 64}, {"teacher"}, (64, "contexts.t.max_tokens")),
        ({"t": 900}, {"reference"}, USUAL),
    ],
)
def test_a_model_must_take_the_longest_prompt_of_all_that_it_answers_for(
    contexts: dict[str, int | None], roles: set[str], longest: tuple[int, str]
) -> None:
    recipe = parse_settings(
        Recipe,
        {
            "run": "r",
            "model": {"path": "m"},
            "prompts": {"task": "addition"},
            "rollout": {"max_prompt_tokens": 512},
            "contexts": {name: {"prompt": "{{ prompt }}", "max_tokens": most} for name, most in contexts.items()},
        },
    )
    assert longest_prompt(recipe, "t", roles) == longest


def test_a_temperature_that_no_server_takes_is_refused_before_the_first_step(
    world: Path, teacher: Any, tmp_path: Path
) -> None:
    data = {
        "run": str(tmp_path / "run"),
        "model": {"path": str(world / "student")},
        "prompts": {"task": "addition", "options": {"digits": 2}},
        "teachers": {"endpoints": [teacher.address], "default": "teacher"},
        "rollout": {"prompts_per_step": 2, "temperature": 0.001, "max_prompt_tokens": 32, "max_new_tokens": 8},
        "eval": {"prompts": 0},
    }
    with pytest.raises(ConfigError, match=r"temperature 0\.001, .* 0\.01 to 100; .*rollout\.temp"):
        check(parse_settings(Recipe, data), offline=False)


@pytest.mark.parametrize(
    ("spec", "settings", "said"),
    [
        (PayloadSpec.topk(4), {}, "payload gather, hidden or sampled"),
        (PayloadSpec.gather(4), {"map_stops": True}, "map_stops to false"),
        (PayloadSpec.gather(4), {}, None),
        (PayloadSpec.hidden(), {}, None),
    ],
)
def test_further_tokens_of_a_teacher_must_not_come_up_in_what_it_is_asked(
    spec: PayloadSpec, settings: dict[str, Any], said: str | None
) -> None:
    tokenizer = make_tokenizer()
    info = pb.TeacherInfo(name="t", vocab_size=len(tokenizer) + 1, stop_token_ids=[len(tokenizer)])
    needs = Needs(signals=(SignalNeed("teacher", spec, 1.0),))
    recipe = parse_settings(
        Recipe,
        {
            "run": "r",
            "model": {"path": "m"},
            "prompts": {"task": "addition"},
            "teachers": {"endpoints": ["localhost:1"], "default": "t", **settings},
        },
    )
    with nullcontext() if said is None else pytest.raises(IncompatibleTeacherError, match=said):
        _check_vocabulary(info, recipe, needs, {"teacher"}, tokenizer)
