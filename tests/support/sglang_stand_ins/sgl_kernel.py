"""In the place of SGLang's kernels for CPUs, of which no wheel exists; it looks some up by name when it is imported.

A server of a dense model calls none of them on a CPU without AMX, where its layers fall back to torch.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **more: object) -> NoReturn:
        raise NotImplementedError(f"SGLang's kernel {name} was called, which this environment does not have.")

    return missing
