"""The optimizer is fused where that saves a copy, and a checkpoint's state goes where it reads it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from student.learning import optimizer
from student.settings.train import TrainSettings


@pytest.mark.parametrize(("device", "fused"), [("cuda", True), ("cpu", None)])
def test_adamw_is_fused_on_cuda(monkeypatch: pytest.MonkeyPatch, device: str, fused: bool | None) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **more: more)  # which looks for the device
    made: Any = optimizer.make_optimizer([], TrainSettings(), torch.device(device))
    assert made["fused"] is fused


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_the_number_of_steps_is_restored_where_the_optimizer_counts(fused: bool | None, device: str) -> None:
    parameter = torch.empty(3, device="meta")
    steps = torch.tensor(5.0)
    made: Any = SimpleNamespace(defaults={"fused": fused})
    state = optimizer.restored(made, {"step": steps, "exp_avg": torch.ones(3)}, parameter)
    assert state["step"].device.type == device and state["step"] is not steps
    assert state["exp_avg"].device.type == "meta"
