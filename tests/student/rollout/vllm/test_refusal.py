"""Without vLLM a recipe that names it is refused at once, with what to install."""

import importlib.util
from typing import Any

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from student.job.plugins import build_plugins
from student.settings.recipe import Recipe


def test_a_recipe_with_vllm_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name == "vllm" else find(name, *args)

    monkeypatch.setattr("opd.extras.find_spec", without)
    data = {
        "run": "never",
        "model": {"path": "/nowhere"},
        "teachers": {"endpoints": ["nowhere:1"]},
        "prompts": {"task": "addition"},
        "rollout": {"engine": {"name": "vllm"}},
    }
    with pytest.raises(ConfigError, match=r"pip install 'opd\[vllm\]'"):
        build_plugins(parse_settings(Recipe, data))
