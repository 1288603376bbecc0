"""Parameters with moments in 8 bits, whole or sharded over ranks, their updates, and their state in files."""

from pathlib import Path
from typing import Any

import torch
from saved_state import save_state
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from student.model.adamw_8bit import AdamW8bit
from student.model.sharding import full, placed
from student.state.state_io import load_state

SHAPES = {
    "even": (64, 128),  # two rows make a block
    "uneven": (5, 1024),  # three rows on the first of two ranks, two on the second
    "half a block": (63, 128),  # the last row fills half of the last block
    "one row": (1, 4096),  # the second of two ranks has none
    "three axes": (4, 16, 96),  # experts
    "vector": (8192,),
    "small": (40, 100),
    "cut": (10, 1000),  # the shard of the first of two ranks ends within a block
    "cut late": (1000, 24),
}
CUT = ["cut", "cut late"]
"""What two ranks hold in float32."""


class Trained:
    """Parameters, and an optimizer that updates them from gradients named by the number of the update.

    Args:
        kind: class of the optimizer.
        mesh: device mesh to shard the parameters over; None for one process.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, kind: Any = AdamW8bit, *, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.mesh, self.dtype = mesh, dtype
        self.parameters = {name: nn.Parameter(value) for name, value in self._drawn(0).items()}
        named = list(self.parameters.values())
        groups = [{"params": named[:4], "weight_decay": 0.1}, {"params": named[4:], "weight_decay": 0.0}]
        self.optimizer = kind(groups, lr=1e-2, betas=(0.9, 0.99))
        self.updates = 0

    def _drawn(self, seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        found = {name: torch.randn(shape, generator=draw).to(self.dtype) for name, shape in SHAPES.items()}
        if self.mesh is None:
            return found
        return {name: distribute_tensor(value, self.mesh, [Shard(0)]) for name, value in found.items()}

    def update(self, count: int) -> "Trained":
        """Make `count` updates."""
        for _ in range(count):
            self.updates += 1
            for name, slope in self._drawn(self.updates).items():
                self.parameters[name].grad = slope
            self.optimizer.step()
        return self

    def save(self, folder: Path, name: str) -> None:
        """Write everything below `folder`; every rank calls it."""
        moments = {key: dict(self.optimizer.state[p]) for key, p in self.parameters.items()}
        save_state(folder, name, {"updates": self.updates, "moments": moments, "parameters": {**self.parameters}})

    def load(self, folder: Path, name: str) -> "Trained":
        """Take over what any number of ranks wrote, as the learner does."""
        state = load_state(folder, name, self.mesh)
        self.updates = state["updates"]
        for key, parameter in self.parameters.items():
            with torch.no_grad():
                parameter.copy_(placed(state["parameters"][key], parameter))
            self.optimizer.state[parameter] = {
                word: value if word == "step" else placed(value, parameter)
                for word, value in state["moments"][key].items()
            }
        return self

    def whole(self) -> dict[str, dict[str, Any]]:
        """Copies of the weights and the moments of each parameter; every rank calls it."""
        found = {key: {**self.optimizer.state[p], "weights": p.detach()} for key, p in self.parameters.items()}
        return {
            key: {word: full(value).clone() if torch.is_tensor(value) else value for word, value in held.items()}
            for key, held in found.items()
        }

    def held_bytes(self) -> int:
        """Bytes of the moments that this process holds."""
        held = (value for state in self.optimizer.state.values() for value in state.values())
        return sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for v in held if torch.is_tensor(v))


def differing(mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the parameters whose weights or moments are not the same bit for bit."""

    def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
        return one.keys() == other.keys() and all(
            torch.equal(one[key], other[key]) if torch.is_tensor(one[key]) else one[key] == other[key] for key in one
        )

    return [name for name in mine if not equal(mine[name], theirs[name])]
