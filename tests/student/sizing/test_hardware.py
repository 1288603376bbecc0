"""The device that a plan is made for."""

from types import SimpleNamespace

import pytest
import torch

from student.sizing.hardware import TABLE, here


@pytest.mark.parametrize(
    ("name", "gib", "like", "shown"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.1, "a100", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA B200", 178.4, "b200", "NVIDIA B200"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090", "NVIDIA GeForce RTX 4090"),
        ("Tesla V100", 15.8, "a100", "Tesla V100, of unknown speed, with those of NVIDIA A100 80 GB"),
    ],
)
def test_a_gpu_has_the_speeds_of_its_name_and_memory_or_says_whose(
    monkeypatch: pytest.MonkeyPatch, name: str, gib: float, like: str, shown: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: card)
    found = here()
    assert (found.name, found.memory) == (shown, card.total_memory)
    assert (found.flops, found.bandwidth) == (TABLE[like].flops, TABLE[like].bandwidth)
