"""Parts of a checkpoint: each is first gathered from all ranks, and then written by one rank.

    gathering a part     may communicate with other ranks, writes nothing
    writing a part       does not communicate, so that a rank which cannot write leaves no other waiting

Ranks gather and write the same number of parts in the same order, and agree after each whether all have succeeded.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of a checkpoint.

    Attributes:
        name: file or folder within the checkpoint, for messages.
        write: writes the part below a given folder, and returns the files that it wrote.
    """

    name: str
    write: Callable[[Path], Iterable[Path]]


def nothing(name: str) -> Part:
    """The part of a rank that has nothing to write while another writes `name`."""
    return Part(name, lambda folder: ())


def files_written(folder: Path, work: Callable[[], object]) -> list[Path]:
    """Do `work`, and list the new files below `folder`; nothing else may write there meanwhile."""
    before = set(folder.rglob("*"))
    work()
    return sorted(path for path in set(folder.rglob("*")) - before if path.is_file())


def on_host(tensors: dict[str, Tensor], *, copied: bool) -> dict[str, Tensor]:
    """Tensors in host memory; those that share memory still do.

    Args:
        tensors: unsharded tensors by name.
        copied: also copy tensors that are on the host already, so that later updates do not change them.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    hosted = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in moved or not tensor.numel():
            moved[place] = tensor.detach().to("cpu", copy=copied)
        hosted[name] = moved[place]
    return hosted
