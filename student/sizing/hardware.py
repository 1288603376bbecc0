"""Devices that a run can be planned for. Peaks are the vendors' figures for dense bfloat16; a run reaches less."""

import os
import time
from dataclasses import dataclass

import torch

from opd.errors import ConfigError

GIB = 2**30
REACHED = 0.4
"""Share of a device's speed that a transformers model reaches in training and prefill."""
USABLE = 0.92
"""Share of a device's memory: allocators lose some of it between tensors."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device.

    Attributes:
        name: shown to the user.
        memory: bytes.
        flops: floating-point operations per second (two per multiply-add), at the precision in use.
        bandwidth: bytes per second of its memory.
        overhead: seconds that the host takes to launch the kernels of a layer in one forward pass.
        reserve: bytes that libraries take before anything of the run does.
        overlaps: whether arithmetic, memory traffic and the host's work go on at the same time.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    overhead: float = 1e-3
    reserve: float = 1.5 * GIB
    overlaps: bool = True

    @property
    def gpu(self) -> bool:
        """Whether it is a GPU."""
        return "CPU" not in self.name


TABLE = {
    "h200": Hardware("NVIDIA H200", 141 * 1e9, 989e12, 4.8e12),
    "h100": Hardware("NVIDIA H100 SXM", 80 * 1e9, 989e12, 3.35e12),
    "a100": Hardware("NVIDIA A100 80 GB", 80 * 1e9, 312e12, 2.0e12),
    "a100-40": Hardware("NVIDIA A100 40 GB", 40 * 1e9, 312e12, 1.55e12),
    "l40s": Hardware("NVIDIA L40S", 48 * 1e9, 362e12, 0.864e12),
    "rtx4090": Hardware("NVIDIA RTX 4090", 24 * 1e9, 165e12, 1.01e12),
}


def hardware(name: str) -> Hardware:
    """The device called `name`; "here" is this machine's.

    Raises:
        ConfigError: for an unknown name.
    """
    if name == "here":
        return here()
    if name not in TABLE:
        raise ConfigError(f"hardware {name!r} is not in the table; use here, {', '.join(TABLE)}.")
    return TABLE[name]


def here() -> Hardware:
    """This machine: its first GPU, whose speed is looked up, or its CPU, whose speed is measured."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        like = next(
            (known for key, known in TABLE.items() if key.split("-")[0].upper() in found.name.upper().replace(" ", "")),
            None,
        )
        known = like or TABLE["a100"]
        return Hardware(found.name, found.total_memory, known.flops, known.bandwidth)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware("the CPU here", memory, _measured_flops(), 1e10, 2e-3, 0.5 * GIB, overlaps=False)


def _measured_flops(size: int = 512, tries: int = 20) -> float:
    """Of float32 products on this CPU, with the threads that torch has now; the best of several tries."""
    left = torch.ones(size, size)
    best = float("inf")
    for _ in range(tries):
        begin = time.perf_counter()
        left @ left
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
