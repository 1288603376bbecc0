"""Writes and reads nested state without pickle: tensors in one safetensors file, everything else in JSON.

Sharded tensors go to a separate folder, of which each rank writes a part (`student.state.shards`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from opd.errors import CheckpointError, PluginError, short
from student.state.parts import Part, nothing, on_host
from student.state.shards import load_shards, save_shards

_SHARDED = "__sharded__"
_TENSOR = "__tensor__"
_ARRAY = "__array__"


def state_parts(
    name: str,
    state: dict[str, Any],
    *,
    main: bool = True,
    group: dist.ProcessGroup | None = None,
    copied: bool = False,
) -> list[Part]:
    """The parts of a state that this rank writes: `name`.json, `name`.safetensors, and shards in folder `name`-shards.

    Args:
        name: stem of both files, including folders relative to the checkpoint.
        state: nested dicts and lists of JSON values, torch tensors and numpy arrays; dict keys are strings.
        main: whether this rank writes what is not sharded; every rank calls this with the same sharded tensors.
        group: process group of the ranks that write the shards; None for the default group.
        copied: hold copies, so that the parts can be written while the state changes.
    """
    sharded: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}

    def strip(node: Any, path: str) -> Any:
        # Checked first, because a DTensor is also a Tensor.
        if isinstance(node, DTensor):
            sharded[path] = node.detach()
            return {_SHARDED: path}
        if isinstance(node, torch.Tensor):
            tensors[path] = node
            return {_TENSOR: path}
        if isinstance(node, np.ndarray):
            tensors[path] = torch.from_numpy(np.array(node))
            return {_ARRAY: path}
        if isinstance(node, dict):
            return {str(key): strip(value, f"{path}/{key}") for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [strip(value, f"{path}/{i}") for i, value in enumerate(node)]
        return node

    skeleton = json.dumps(strip(state, ""), indent=1)
    parts = []
    if sharded:
        held = BlockingAsyncStager().stage(sharded) if copied else sharded
        parts.append(Part(f"{name}-shards", lambda folder: save_shards(folder / f"{name}-shards", held, group)))
    plain = _apart(on_host(tensors, copied=copied)) if main else {}

    def write(folder: Path) -> list[Path]:
        files = [folder / f"{name}.json", folder / f"{name}.safetensors"]
        files[0].parent.mkdir(parents=True, exist_ok=True)
        files[0].write_text(skeleton, encoding="utf-8")
        save_file(plain, files[1])
        return files

    return [*parts, Part(name, write) if main else nothing(name)]


def check_state(where: str, state: Any) -> None:
    """Refuse a plug-in's state that cannot be written, or would be read back as something else.

    Args:
        where: the plug-in, for messages.
        state: the result of its `state_dict`.

    Raises:
        PluginError: naming the place in the state.
    """

    def check(node: Any, place: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                # JSON would turn the key into a string, which `load_state_dict` would not find.
                if not isinstance(key, str):
                    refuse(key, f"key {key!r} of {place or 'the whole'}", "a text")
                check(value, f"{place}.{key}".removeprefix("."))
        elif isinstance(node, list | tuple):
            for i, value in enumerate(node):
                check(value, f"{place}.{i}")
        elif isinstance(node, np.ndarray):
            if node.dtype.kind not in "biufc":
                refuse(node.dtype, f"the array {place}", "an array of numbers, or a list")
        elif not (node is None or isinstance(node, str | int | float | torch.Tensor)):
            refuse(node, place, "a JSON value, a numpy array or a tensor")

    def refuse(value: Any, place: str, wanted: str) -> None:
        raise PluginError(
            f"the state_dict of {where} cannot be saved: {place} is {short(value)} ({type(value).__name__}), but it "
            f"must be {wanted}."
        )

    if not isinstance(state, dict):
        refuse(state, "it", "a dict, {} for none")
    check(state, "")


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors, copied if two names share memory, which safetensors refuses."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        place = whole.untyped_storage().data_ptr()
        apart[name] = whole.clone() if place in seen else whole
        seen.add(place)
    return apart


def load_state(folder: Path, name: str, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Read a state that `state_parts` wrote; tensors are on the CPU, saved shards over `mesh` if it is given.

    Raises:
        CheckpointError: if a file is missing or damaged.
    """
    try:
        tensors = load_file(folder / f"{name}.safetensors")
        skeleton = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except Exception as error:
        raise CheckpointError(f"state {name!r} in {folder} cannot be read: {error}.") from error

    # Find all names first, because sharded tensors are read in one collective call with the same names on every rank.
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
