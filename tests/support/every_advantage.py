"""Every registered advantage, as the recipe of a run names it."""

from typing import Any

from student.rl import ADVANTAGES
from student.rl.advantages.base import Modifier

_NEEDY: dict[str, dict[str, Any]] = {
    "noisy_forward": {"learns": True},
    "trloo": {"group": ["uid"]},
    "mapo": {"group": ["uid"]},
}


READ = [{"name": "infopo"}, {"name": "spae"}, {"name": "answer_classes"}]
"""Rewards that give what some advantages read."""


def every_advantage() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All estimators, then all modifiers, with the settings that they cannot do without.

    They need rewards `appeals` and `READ`, and methods `critic`, `archer_critic` and `hiper_critic`.
    """
    loaded = {entry.name: ADVANTAGES.load(entry.name) for entry in ADVANTAGES}
    modifiers = [name for name, cls in loaded.items() if issubclass(cls, Modifier)]
    estimators = [{"name": name, **_NEEDY.get(name, {})} for name in loaded if name not in modifiers]
    return estimators, [{"name": name} for name in modifiers]
