"""Write and read nested state without pickle: tensors in one safetensors file, everything else in JSON.

Sharded tensors go to a folder of their own, of which each rank writes its part (`student.run.shards`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from opd.errors import CheckpointError
from student.run.shards import load_shards, save_shards

_SHARDED = "__sharded__"
_TENSOR = "__tensor__"
_ARRAY = "__array__"


def save_state(folder: Path, name: str, state: dict[str, Any], *, main: bool = True) -> None:
    """Write `state` as `name`.json and `name`.safetensors below `folder`, and sharded tensors in folder `name`-shards.

    Args:
        folder: existing folder.
        name: stem of both files.
        state: nested dicts and lists of JSON values, torch tensors and numpy arrays; dict keys are strings.
        main: whether this rank writes what is not sharded; where anything is, every rank calls this.
    """
    sharded: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def strip(node: Any, path: str) -> Any:
        if isinstance(node, DTensor):
            sharded[path] = node.detach()
            return {_SHARDED: path}
        if isinstance(node, torch.Tensor):
            host = node.detach().to("cpu").contiguous()
            # Copied only where two names share memory, which safetensors does not write.
            place = host.untyped_storage().data_ptr()
            tensors[path] = host.clone() if place in seen else host
            seen.add(place)
            return {_TENSOR: path}
        if isinstance(node, np.ndarray):
            tensors[path] = torch.from_numpy(np.ascontiguousarray(node)).clone()
            return {_ARRAY: path}
        if isinstance(node, dict):
            return {str(key): strip(value, f"{path}/{key}") for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [strip(value, f"{path}/{i}") for i, value in enumerate(node)]
        return node

    skeleton = strip(state, "")
    if sharded:
        save_shards(folder / f"{name}-shards", sharded)
    if main:
        (folder / f"{name}.json").write_text(json.dumps(skeleton, indent=1), encoding="utf-8")
        save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Read what `save_state` wrote; tensors come back on the CPU, sharded ones over `mesh`, if there is one.

    Raises:
        CheckpointError: when a file is missing or damaged.
    """
    try:
        tensors = load_file(folder / f"{name}.safetensors")
        skeleton = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except Exception as error:
        raise CheckpointError(f"state {name!r} in {folder} cannot be read: {error}.") from error

    names: list[str] = []

    def find(node: Any) -> None:
        if isinstance(node, dict) and set(node) == {_SHARDED}:
            names.append(node[_SHARDED])
        elif isinstance(node, dict | list):
            for value in node.values() if isinstance(node, dict) else node:
                find(value)

    find(skeleton)
    shards = load_shards(folder / f"{name}-shards", names, mesh) if names else {}

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            if set(node) == {_SHARDED}:
                return shards[node[_SHARDED]]
            if set(node) == {_TENSOR}:
                return tensors[node[_TENSOR]]
            if set(node) == {_ARRAY}:
                return tensors[node[_ARRAY]].numpy()
            return {key: fill(value) for key, value in node.items()}
        return [fill(value) for value in node] if isinstance(node, list) else node

    result: dict[str, Any] = fill(skeleton)
    return result
