"""Devices that a run can be planned for: a table of GPUs, and this machine's own device.

Peak speeds in the table are the vendors' figures for dense bfloat16. A run reaches the share `Hardware.reached`.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from opd.errors import ConfigError

GIB = 2**30
REACHED = 0.4
"""Share of a GPU's speed that a transformers model reaches in training and prefill."""
_CPU_REACHED = 0.55
_CPU_OVERHEAD = 2.5
"""Ratio of the host's time per layer in a rollout, with cache and sampling, to that in a bare forward pass."""
USABLE = 0.92
"""Share of a device's memory that can be used: allocators lose the rest to fragmentation."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device.

    Attributes:
        name: name shown to the user.
        memory: size of its memory in bytes.
        flops: peak floating-point operations per second (two per multiply-add), at the precision in use.
        bandwidth: memory bandwidth in bytes per second.
        overhead: seconds that the host takes to launch the kernels of one layer in one forward pass.
        reserve: bytes that libraries take before the run allocates anything.
        overlaps: whether arithmetic, memory traffic and the host's work overlap in time.
        reached: share of `flops` that a model reaches in training and prefill.
        half: how many times as fast products in bfloat16 are; 1 on a GPU, whose `flops` are those of bfloat16.
        spare: whether rollouts and learning in two threads of one process have cores of their own.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    overhead: float = 1e-3
    reserve: float = 1.5 * GIB
    overlaps: bool = True
    reached: float = REACHED
    half: float = 1.0
    spare: bool = False

    def in_half(self) -> "Hardware":
        """The device at its speed in bfloat16."""
        return replace(self, flops=self.flops * self.half, half=1.0)

    @property
    def gpu(self) -> bool:
        """Whether it is a GPU."""
        return "CPU" not in self.name


TABLE = {
    "b200": Hardware("NVIDIA B200", 180 * 1e9, 2250e12, 8.0e12),
    "h200": Hardware("NVIDIA H200", 141 * 1e9, 989e12, 4.8e12),
    "h100": Hardware("NVIDIA H100 SXM", 80 * 1e9, 989e12, 3.35e12),
    "a100": Hardware("NVIDIA A100 80 GB", 80 * 1e9, 312e12, 2.0e12),
    "a100-40": Hardware("NVIDIA A100 40 GB", 40 * 1e9, 312e12, 1.55e12),
    "l40s": Hardware("NVIDIA L40S", 48 * 1e9, 362e12, 0.864e12),
    "rtx4090": Hardware("NVIDIA RTX 4090", 24 * 1e9, 165e12, 1.01e12),
}


def hardware(name: str) -> Hardware:
    """Return the device called `name`, a key of `TABLE`, or for "here" this machine's.

    Raises:
        ConfigError: for an unknown name.
    """
    if name == "here":
        return here()
    if name not in TABLE:
        raise ConfigError(f"hardware {name!r} is not in the table; use here, {', '.join(TABLE)}.")
    return TABLE[name]


def here() -> Hardware:
    """Return this machine's device: its first GPU, with speeds looked up by name, or its CPU, with speeds measured.

    A GPU that is not in the table gets the speeds of the A100; its name then says so.
    """
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        title = device.name.upper().replace(" ", "")
        like = [card for key, card in TABLE.items() if key.split("-")[0].upper() in title]
        # Cards of the same name exist with different memory and speed. Take the one whose memory is closest.
        card = min(like or [TABLE["a100"]], key=lambda card: abs(card.memory - device.total_memory))
        name = device.name if like else f"{device.name}, of unknown speed, with those of {card.name}"
        return Hardware(name, device.total_memory, card.flops, card.bandwidth)
    flops = _measured_flops()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(
        "the CPU here",
        memory,
        flops,
        _measured_bandwidth(),
        _CPU_OVERHEAD * _measured_overhead(),
        0.5 * GIB,
        overlaps=False,
        reached=_CPU_REACHED,
        half=max(1.0, _measured_flops(dtype=torch.bfloat16) / flops),
        spare=len(os.sched_getaffinity(0)) >= 2 * torch.get_num_threads(),
    )


def _measured_flops(size: int = 512, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of matrix products on this CPU, with torch's current threads."""
    left = torch.ones(size, size, dtype=dtype)
    # A CPU without instructions for bfloat16 takes a hundred times as long.
    return 2 * size**3 / _least_seconds(lambda: left @ left, within=0.5)


def _measured_bandwidth(size: int = 64 << 20) -> float:
    """Memory bandwidth of a copy in bytes per second, counting bytes read and written."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / _least_seconds(lambda: target.copy_(source))


def _measured_overhead(layers: int = 4) -> float:
    """Seconds that a forward pass takes per layer when there is next to nothing to compute."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        head_dim=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3Model(config).eval()
    ids = torch.zeros((8, 1), dtype=torch.long)
    with torch.no_grad():
        return _least_seconds(lambda: model(ids, use_cache=False)) / layers


def _least_seconds(work: Callable[[], object], tries: int = 20, within: float = math.inf) -> float:
    """Shortest time of several tries in seconds: other load on the machine can only make a try longer.

    No try begins after `within` seconds.
    """
    best, start = math.inf, time.perf_counter()
    for _ in range(tries):
        begin = time.perf_counter()
        if begin - start > within:
            break
        work()
        best = min(best, time.perf_counter() - begin)
    return best
