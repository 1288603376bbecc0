"""Copies between host and device: when they may be asynchronous."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from teacher_server.engines.host_copy import HostCopy, to_device


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


def test_only_copies_to_cuda_are_not_waited_for() -> None:
    class Host(torch.Tensor):
        def to(self, device: torch.device, *, non_blocking: bool) -> Any:  # a torch without the device refuses to try
            return non_blocking

    host = torch.empty(4).as_subclass(Host)
    assert [to_device(host, torch.device(name)) for name in ("cuda", "mps", "xpu")] == [True, False, False]
