"""Parts of a checkpoint: gathered from all ranks first, written by one after.

    gathering a part     may ask other ranks, writes nothing
    writing a part       asks no other rank, so that one which cannot write leaves none waiting for it

Ranks gather and write equally many parts, in the same order, and agree after each whether all have succeeded.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes of a checkpoint.

    Attributes:
        name: file or folder below the checkpoint, for messages.
        write: writes it below the folder it is given, and says which files it wrote.
    """

    name: str
    write: Callable[[Path], Iterable[Path]]


def nothing(name: str) -> Part:
    """The part of a rank that has nothing to write while another writes `name`."""
    return Part(name, lambda folder: ())


def files_written(folder: Path, work: Callable[[], object]) -> list[Path]:
    """Do `work`, and list the files below `folder` that are new; nothing else may write there meanwhile."""
    before = set(folder.rglob("*"))
    work()
    return sorted(path for path in set(folder.rglob("*")) - before if path.is_file())


def on_host(tensors: dict[str, Tensor], *, copied: bool) -> dict[str, Tensor]:
    """Tensors in the memory of the host, where those that share memory share it still.

    Args:
        tensors: by name; none is sharded.
        copied: copy also those that are there already, so that later updates do not reach them.
    """
    moved: dict[tuple[object, ...], Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in moved or not tensor.numel():
            moved[place] = tensor.detach().to("cpu", copy=copied)
        found[name] = moved[place]
    return found
