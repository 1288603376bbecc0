"""A rollout engine with weights of its own trains like the trained model itself: it is synced whenever they moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import student_plugins

from opd.errors import ConfigError
from student.job.session import train
from student.settings.recipe import Recipe

GATE = {"kind": "reverse_kl", "prompts": 8, "gain": 0.0, "length_tolerance": 9, "truncation_tolerance": 1}
ADWIN = {"name": "adwin", "windows": [2, 4], "rows": 8, "folds": 2, "delay": 1, "null_every": 0, "rho": 0.3}
SEVERAL = {"steps": 3, "epochs": 1, "minibatches": 2}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"train": SEVERAL, "eval": {"prompts": 8, "every": 1}}, id="several updates and evaluations"),
        pytest.param(
            {"methods": [{"name": "effopd", "tries": 3, "gate": GATE}]},
            id="weights tried by a method",
            marks=pytest.mark.slow,
        ),
        pytest.param({"methods": [ADWIN]}, id="a probe beside training"),
        pytest.param(
            {"methods": [{**ADWIN, "background": False}]}, id="a probe in the foreground", marks=pytest.mark.slow
        ),
    ],
)
def test_an_engine_with_weights_of_its_own_trains_like_the_model_itself(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    changes: dict[str, Any],
) -> None:
    exact = [{"name": "opd", "payload": "hidden", "aggregation": "constant"}]
    changes = {"objective": exact, "eval": {"prompts": 0}, "train": {"steps": 3}, **changes}
    plain = train(make_recipe(run=str(tmp_path / "plain"), **changes))
    student_plugins.CopyEngine.syncs = 0
    engine = {"engine": {"name": "student_plugins:CopyEngine"}}
    copied = train(make_recipe(run=str(tmp_path / "copied"), **changes, rollout=engine))
    assert student_plugins.CopyEngine.syncs >= 3
    assert hashes(Path(copied["checkpoint"])) == hashes(Path(plain["checkpoint"]))
    for name in ("before", "after"):
        assert copied[name] == plain[name]


def test_an_unknown_engine_is_refused_before_anything_is_loaded(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(rollout={"engine": {"name": "transformer"}}, model={"path": "/nowhere"})
    with pytest.raises(ConfigError, match=r"rollout_engine 'transformer'.* 'transformers'"):
        train(recipe)
