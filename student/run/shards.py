"""Sharded tensors of a checkpoint, by torch.distributed.checkpoint in safetensors files: no pickle, no tensor whole.

Each rank writes what it holds, and reads what it holds of what any number of ranks wrote.
"""

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import empty as empty_shards

from opd.errors import CheckpointError


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write sharded tensors below `folder`; every rank calls it with the same names.

    Raises:
        OSError: on every rank, when one could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise OSError("; ".join(f"rank {rank}: {found[0]}" for rank, found in error.failures.items())) from error


def load_shards(folder: Path, names: Collection[str], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Read tensors that `save_shards` wrote.

    Args:
        folder: as it was saved.
        names: those wanted.
        mesh: ranks to shard them over, in rows; None for whole tensors on the CPU.

    Raises:
        CheckpointError: when one is missing or cannot be read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        found: dict[str, Tensor] = {}
        for name in sorted(names):
            size, dtype = saved[name].size, saved[name].properties.dtype
            if mesh is None:
                found[name] = torch.empty(size, dtype=dtype)
            else:
                found[name] = empty_shards(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
        with warnings.catch_warnings():  # that there is one process is no news
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(found, storage_reader=reader, no_dist=mesh is None)
    except (CheckpointException, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"the sharded state in {folder} cannot be read: {error}.") from error
    return found
