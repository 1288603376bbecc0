"""Which weights count as left alone, and what cannot be measured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from opd.errors import ConfigError
from opd_zoo.updates.update_sparsity import UpdateSparsity, UpdateSparsitySettings
from student.plugin.controllers import begin

FIRST = {"a": torch.zeros(2, 4), "b": torch.ones(8)}


def started(folder: Path, now: dict[str, Any], **model: Any) -> tuple[UpdateSparsity, Any]:
    save_file(FIRST, folder / "model.safetensors")
    made = UpdateSparsity(UpdateSparsitySettings(name="update_sparsity", every=2))
    recipe = SimpleNamespace(model=SimpleNamespace(path=str(folder), revision=None, lora=model.get("lora")))
    made.check(recipe, [])  # type: ignore[arg-type]
    services = SimpleNamespace(parameters=lambda: iter(now.items()))
    begin(made, services)  # type: ignore[arg-type]
    return made, services


def test_a_weight_that_moved_no_farther_than_the_bound_is_left_alone(tmp_path: Path) -> None:
    now = {"a": FIRST["a"].clone(), "b": FIRST["b"].clone()}
    now["a"][0, :3] = torch.tensor([2e-5, -1.0, 9e-6])
    made, services = started(tmp_path, now)
    assert made.after_update(0, services) == {}
    found = made.after_update(1, services)
    assert found == {"update_sparsity": 14 / 16, "update_sparsity_least": 6 / 8}


def test_what_has_no_first_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapters of model\.lora"):
        started(tmp_path, {}, lora=object())
    with pytest.raises(ConfigError, match="no tensor 'c'"):
        started(tmp_path, {"c": torch.zeros(1)})
