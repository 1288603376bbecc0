"""Copies between host and device: when they may be asynchronous, and what they leave in memory."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from teacher_server.engines.project import HostCopy, to_device


class _Copies(TorchDispatchMode):
    """Notes for each copy between devices whether it may be asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self.asynchronous: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.copy_.default:
            self.asynchronous.append(bool(args[2]) if len(args) > 2 else False)
        return function(*args, **kwargs)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_copies_of_accelerators_that_nobody_waits_for_are_not_asynchronous(device: str) -> None:
    with FakeTensorMode(), _Copies() as copies:
        block = {"finite": torch.empty(4, dtype=torch.bool, device=device), "sampled": torch.empty(4, device=device)}
        HostCopy([block], 4)
    assert copies.asynchronous == [False, False]


def test_only_copies_to_cuda_are_not_waited_for_and_those_come_from_pinned_memory() -> None:
    class Host:  # a torch without the devices refuses to try
        def pin_memory(self) -> Any:
            return Pinned()

        def to(self, device: torch.device, *, non_blocking: bool = False) -> str:
            return f"{type(self).__name__}, {non_blocking}"

    class Pinned(Host): ...

    host: Any = Host()
    found = [to_device(host, torch.device(name)) for name in ("cuda", "mps", "xpu")]
    assert found == ["Pinned, True", "Host, False", "Host, False"]


@pytest.mark.parametrize("lengths", [[1, 999], [500, 500], [1000]])
def test_the_scores_of_a_sequence_hold_no_memory_of_its_neighbours(lengths: list[int]) -> None:
    rows = torch.arange(2000, dtype=torch.float32).reshape(1000, 2)
    copy = HostCopy([{"finite": torch.ones(1000, dtype=torch.bool), "values": rows}], 1000)
    scores = [one for one in copy.split(lengths, "w") if one is not None and one.values is not None]
    assert torch.equal(torch.cat([torch.from_numpy(one.values) for one in scores]), rows)
    del copy
    for one, length in zip(scores, lengths, strict=True):
        owner: Any = one.values
        while getattr(owner, "base", None) is not None:
            owner = owner.base
        assert owner.nbytes == length * 8
