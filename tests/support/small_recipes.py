"""Recipes of one objective and little else, for dry runs without a model."""

from pathlib import Path
from typing import Any

from opd.config import parse_settings
from student.commands.dry_run import check
from student.settings.recipe import Recipe

CHAT = {"endpoint": "http://127.0.0.1:9/v1", "model": "judge"}
PLAIN = {"name": "policy_gradient", "ratio": "none"}
ALL = {"name": "cispo", "rows": "all"}
MIXED = {"name": "mixed_context"}
TABLE = {"file": "prompts.jsonl", "verifier": "numeric"}


def credit(*entries: Any) -> dict[str, Any]:
    """A plain policy gradient with these advantages, by name or with settings."""
    return {**PLAIN, "advantage": [{"name": entry} if isinstance(entry, str) else entry for entry in entries]}


def strategy(name: str, **settings: Any) -> dict[str, Any]:
    return {"rollout": {"strategy": {"name": name, **settings}}}


def method(name: str, **settings: Any) -> dict[str, Any]:
    return {"methods": [{"name": name, **settings}]}


def reward(name: str, **settings: Any) -> dict[str, Any]:
    return {"rewards": [{"name": name, **settings}]}


def of(objective: Any = PLAIN, **changes: Any) -> dict[str, Any]:
    return {"objective": objective if isinstance(objective, list) else [objective], **changes}


def noisy(objective: Any, **rates: Any) -> dict[str, Any]:
    return of(objective, **reward("noisy_verifier", **rates))


BOTH_AT_2 = {"teacher_temperature": 2.0, "student_temperature": 2.0}
SERVERS = {"rollout": {"engine": {"name": "vllm_server", "endpoints": ["http://127.0.0.1:9"], "folder": "/tmp"}}}
SERVED = {"teachers": {"reference": "initial", "default": "ema"}}
BY_DOMAIN = {"domains": {"a": {"false_negative": 0.3}}}


def dry_run(changes: dict[str, Any], folder: Path) -> str:
    base: dict[str, Any] = {
        "run": str(folder / "run"),
        "model": {"path": "unused"},
        "prompts": {"task": "addition"},
        "teachers": {"reference": "initial"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 64},
        "train": {"steps": 20},
    }
    merged = {
        key: {**base.get(key, {}), **value} if key in ("rollout", "train") else value for key, value in changes.items()
    }
    return check(parse_settings(Recipe, base | merged), offline=True)
