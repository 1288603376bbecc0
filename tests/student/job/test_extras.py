"""What a recipe will need at some time is asked for in its first second, in a dry run too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from run_folders import RECIPE

import opd.extras
from opd.config import parse_settings
from opd.errors import ConfigError
from student.job.extras import FEATURES, check_extras
from student.job.plugins import build_plugins
from student.orbit.cli import _check
from student.orbit.recipe import MERGE, OrbitRecipe
from student.plugin.base import Plugin
from student.settings.recipe import Recipe

Lacking = Callable[..., None]


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> Lacking:
    """Leave packages out, as where an extra is not installed."""

    def lack(*packages: str) -> None:
        monkeypatch.setattr(opd.extras, "find_spec", lambda name: None if name.partition(".")[0] in packages else name)

    return lack


def recipe(**more: Any) -> Recipe:
    return parse_settings(Recipe, {**yaml.safe_load(RECIPE), **more})


@pytest.mark.parametrize(
    ("changes", "package", "extra"),
    [
        ({"model": {"path": "m", "lora": {"rank": 4}}}, "peft", "lora"),
        ({"model": {"path": "m", "lora": {"rank": 4, "quantize": "nf4"}}}, "bitsandbytes", "quantized"),
        ({"train": {"optimizer": "adamw_8bit"}}, "bitsandbytes", "quantized"),
        ({"tracing": True}, "opentelemetry", "otel"),
        ({"trackers": [{"name": "wandb"}]}, "wandb", "trackers"),
    ],
)
def test_a_key_whose_package_is_missing_is_refused_before_anything_is_loaded(
    lacking: Lacking, changes: dict[str, Any], package: str, extra: str
) -> None:
    lacking(package)
    with pytest.raises(ConfigError, match=rf"needs {package}, .* pip install 'opd\[{extra}\]'"):
        build_plugins(recipe(**changes))


def test_a_recipe_without_such_keys_needs_none_of_them(lacking: Lacking) -> None:
    lacking(*(feature.package.partition(".")[0] for feature in FEATURES))
    build_plugins(recipe())


def test_a_plugin_says_which_packages_it_imports(lacking: Lacking) -> None:
    class Far(Plugin[Any]):
        extras: ClassVar[dict[str, str]] = {"far_away": "envs"}

    lacking("far_away")
    far = Far(type("Settings", (), {"name": "far"})())
    with pytest.raises(ConfigError, match=r"far needs far_away, .* pip install 'opd\[envs\]'"):
        check_extras(recipe(), [far])


def test_orbit_asks_for_what_merges_before_its_first_stage(lacking: Lacking, tmp_path: Path) -> None:
    job = {"prompts_per_step": 4, "samples_per_prompt": 2}
    data = {
        "run": str(tmp_path / "orbit"),
        "model": {"path": "m"},
        "prompts": {"task": "addition"},
        "modes": {"long": {"budget": 8, "prefix": "L"}, "short": {"budget": 4, "prefix": "S"}},
        "rl": {"objective": [{"name": "rloo"}], "rollout": job, "train": {"steps": 2}},
        "fusion": {"objective": [{"name": "opd"}], "methods": [{"name": "modes"}], "train": {"steps": 2}},
    }
    orbit = parse_settings(OrbitRecipe, data)
    _check(orbit, offline=True, show=False)
    lacking("mergekit")
    with pytest.raises(ConfigError, match=r"needs mergekit, .* pip install 'opd\[merge\]'"):
        _check(orbit, offline=True, show=False)
    orbit.stage_folder(MERGE).mkdir(parents=True)
    _check(orbit, offline=True, show=False)  # merged already: what is left can be done without it
