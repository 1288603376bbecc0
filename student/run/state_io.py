"""Write and read nested state without pickle: tensors in one safetensors file, everything else in JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from opd.errors import CheckpointError

_TENSOR = "__tensor__"
_ARRAY = "__array__"


def save_state(folder: Path, name: str, state: dict[str, Any]) -> None:
    """Write `state` as `name`.json and `name`.safetensors below `folder`.

    Args:
        folder: existing folder.
        name: stem of both files.
        state: nested dicts and lists of JSON values, torch tensors and numpy arrays; dict keys are strings.
    """
    tensors: dict[str, torch.Tensor] = {}

    def strip(node: Any, path: str) -> Any:
        if isinstance(node, torch.Tensor):
            tensors[path] = node.detach().to("cpu").contiguous().clone()
            return {_TENSOR: path}
        if isinstance(node, np.ndarray):
            tensors[path] = torch.from_numpy(np.ascontiguousarray(node)).clone()
            return {_ARRAY: path}
        if isinstance(node, dict):
            return {str(key): strip(value, f"{path}/{key}") for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [strip(value, f"{path}/{i}") for i, value in enumerate(node)]
        return node

    (folder / f"{name}.json").write_text(json.dumps(strip(state, ""), indent=1), encoding="utf-8")
    save_file(tensors, folder / f"{name}.safetensors")


def load_state(folder: Path, name: str) -> dict[str, Any]:
    """Read what `save_state` wrote; tensors come back on the CPU.

    Raises:
        CheckpointError: when a file is missing or damaged.
    """
    try:
        tensors = load_file(folder / f"{name}.safetensors")
        skeleton = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except Exception as error:
        raise CheckpointError(f"state {name!r} in {folder} cannot be read: {error}.") from error

    def fill(node: Any) -> Any:
        if isinstance(node, dict):
            if set(node) == {_TENSOR}:
                return tensors[node[_TENSOR]]
            if set(node) == {_ARRAY}:
                return tensors[node[_ARRAY]].numpy()
            return {key: fill(value) for key, value in node.items()}
        return [fill(value) for value in node] if isinstance(node, list) else node

    result: dict[str, Any] = fill(skeleton)
    return result
