"""What a checkpoint holds, tensor by tensor: files of shards may name the same ones in another order."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from student.state.state_io import load_state


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by file or state and name, sharded ones whole."""
    found = {f"model/{n}": t for f in (checkpoint / "model").glob("*.safetensors") for n, t in load_file(f).items()}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, torch.Tensor):
            found[path] = node
        elif isinstance(node, dict | list):
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                walk(value, f"{path}/{key}")

    for name in ("learner", "local", "loop", "ahead"):
        if (checkpoint / "trainer" / f"{name}.json").exists():
            walk(load_state(checkpoint / "trainer", name), name)
    return found


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys() and len(mine) > 20
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def assert_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    weights = [name for name in mine if name.startswith("model/")]
    assert weights and weights == [name for name in theirs if name.startswith("model/")]
    for name in weights:
        torch.testing.assert_close(mine[name], theirs[name], atol=2e-4, rtol=1e-3)
