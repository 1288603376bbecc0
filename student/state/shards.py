"""Sharded tensors of a checkpoint, by torch.distributed.checkpoint in safetensors files, without pickle.

No tensor is ever gathered. Each rank writes its own shards, and reads its shards from what any number of ranks wrote.
"""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import empty as empty_shards
from torch.futures import Future

from opd.errors import CheckpointError


class _Writer(HuggingFaceStorageWriter):
    """Remembers the files that this rank wrote.

    Attributes:
        files: their names.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path, save_distributed=True)
        self.files: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        self.files |= {result.storage_data.relative_path for result in results.wait()}
        return results


def save_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> list[Path]:
    """Write sharded tensors below `folder`; every rank must call it with the same names.

    torch's planner communicates between ranks; a failure there ends the call on all of them.

    Args:
        folder: a folder that every rank sees.
        tensors: sharded tensors by name.
        group: process group of the ranks; None for the default one.

    Returns:
        The files that this rank wrote.

    Raises:
        OSError: if this rank could not write; nothing is raised on the others, which must ask it.
    """
    writer = _Writer(str(folder))
    try:
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        mine = error.failures.get(dist.get_rank(group))
        if mine is not None:
            raise OSError(f"{type(mine[0]).__name__}: {mine[0]}") from error
        return []
    return [folder / name for name in sorted(writer.files)]


def load_shards(folder: Path, names: Collection[str], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Read tensors that `save_shards` wrote.

    Args:
        folder: the folder that was written.
        names: names of the tensors to read.
        mesh: device mesh to shard them over, by rows; None for whole tensors on the CPU.

    Raises:
        CheckpointError: if a tensor is missing or cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Tensor] = {}
        for name in sorted(names):
            size, dtype = saved[name].size, saved[name].properties.dtype
            if mesh is None:
                tensors[name] = torch.empty(size, dtype=dtype)
            else:
                tensors[name] = empty_shards(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        with warnings.catch_warnings():  # with `no_dist`, a single process is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, no_dist=mesh is None)
    except (CheckpointException, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"the sharded state in {folder} cannot be read: {error}.") from error
    return tensors
