"""AdamW with moments in 8 bits (arXiv 2110.02861), by bitsandbytes' kernels, for whole and for sharded parameters.

    a block    256 moments in the order of memory, one byte each, with one float32 scale: 2.03 bytes per parameter
    a shard    the rows of a parameter that a rank holds under FSDP2; the kernels work on each rank's own

Moments are laid out like their parameter. Scales are [groups, blocks in a group], where a group is the least number of
rows that ends where a block ends: one row if a row has a multiple of 256 elements. Both are sharded by rows, and a
rank's scales are those of its codes wherever its rows are whole groups. Blocks, and with them updates and checkpoints,
are then the same for any number of ranks.

Moments stay in float32 in tensors of fewer than 4,096 elements and where a shard would end within a block.

No library's own optimizer serves: bitsandbytes' AdamW8bit (0.50) resumes bit for bit in one process, but its update
raises on the DTensors of FSDP2; torchao's (0.18) holds moments that safetensors cannot, and compiles its first step.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import zeros as zero_shards

from student.model.quantized import import_bitsandbytes
from student.model.sharding import full

_BLOCK, _LEAST = 256, 4096
_EPS = 1e-8
_MOMENT = "moment1"
"""A key of the optimizer's state that torch's AdamW does not have."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are held in 8 bits; arguments and updates are those of `torch.optim.AdamW`.

    The state of a parameter is `step`, `moment1` and `moment2`, and `scales1` and `scales2` if the moments are codes.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})
        self._library = import_bitsandbytes().functional
        # The values of the 256 codes, for the first moment, which has a sign, and for the second.
        self._values = [self._library.create_dynamic_map(signed=signed) for signed in (True, False)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters that have a gradient; every rank must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        if not state:
            state.update(_zeros(parameter, ranks))
        elif "scales1" in state and not _in_codes(parameter.shape, ranks):
            self._widen(state, parameter, ranks)  # from a checkpoint of another number of ranks
        state["step"] += 1
        if not isinstance(parameter, DTensor):  # the kernels take elements in the order of memory, as shards are
            parameter.data = parameter.data.contiguous()
        held, slope, first, second = (
            _local(tensor) for tensor in (parameter, parameter.grad, state["moment1"], state["moment2"])
        )
        if held.numel() == 0:  # this rank has none of the rows
            return
        slope, (beta1, beta2), rate, decay = slope.contiguous(), group["betas"], group["lr"], group["weight_decay"]
        if "scales1" not in state:
            self._library.optimizer_update_32bit(
                "adam", slope, held, first, beta1, _EPS, state["step"], rate, second, beta2, weight_decay=decay
            )
            return
        blocks = -(-held.numel() // _BLOCK)
        scales = [_local(state[key]).view(-1)[:blocks] for key in ("scales1", "scales2")]
        self._values = [values.to(held.device) for values in self._values]
        self._library.optimizer_update_8bit_blockwise(
            *("adam", slope, held, first, second, beta1, beta2, 0.0, 0.0, _EPS, state["step"], rate),
            *(*self._values, *scales, decay),
        )

    def _widen(self, state: dict[str, Any], parameter: Tensor, ranks: int) -> None:
        """Turn codes into float32 moments where the ranks cut blocks; every rank must call it, for the scales."""
        shape, mesh = parameter.shape, parameter.device_mesh  # type: ignore[attr-defined]
        start = mesh.get_local_rank() * _rows(shape, ranks) * math.prod(shape[1:])
        for key, values in zip("12", self._values, strict=True):
            scales, codes = full(state.pop(f"scales{key}")).view(-1), _local(state[f"moment{key}"])
            moment = torch.zeros_like(codes, dtype=torch.float32)
            if codes.numel():
                before = start % _BLOCK  # the elements of the first block that another rank holds
                padded = torch.nn.functional.pad(codes.view(-1), (before, 0))
                scales = scales[start // _BLOCK :][: -(-padded.numel() // _BLOCK)].contiguous()
                widened = self._library.dequantize_blockwise(
                    padded, absmax=scales, code=values.to(codes.device), blocksize=_BLOCK
                )
                moment = widened[before:].view_as(codes)
            state[f"moment{key}"] = DTensor.from_local(
                moment, mesh, [Shard(0)], run_check=False, shape=shape, stride=parameter.stride()
            )


def _local(tensor: Any) -> Tensor:
    """What this rank holds of a tensor."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _rows(shape: tuple[int, ...], ranks: int) -> int:
    """Rows of a shard; the last ones may have fewer."""
    return -(-shape[0] // ranks)


def _group(shape: tuple[int, ...]) -> int:
    """The least number of rows that ends where a block ends, and no more than there are."""
    return min(shape[0], _BLOCK // math.gcd(math.prod(shape[1:]), _BLOCK))


def _in_codes(shape: tuple[int, ...], ranks: int) -> bool:
    """Whether the moments of a parameter over `ranks` ranks are held in 8 bits."""
    if math.prod(shape) < _LEAST:
        return False
    rows = _rows(shape, ranks)
    return rows == shape[0] or rows % _group(shape) == 0


def _scales(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of the scales of a parameter's moments: [groups, blocks in a group]."""
    rows = _group(shape)
    return -(-shape[0] // rows), -(-rows * math.prod(shape[1:]) // _BLOCK)


def _zeros(parameter: Tensor, ranks: int) -> dict[str, Any]:
    """The state of a parameter before its first update."""
    if not _in_codes(parameter.shape, ranks):
        return {"step": 0} | {key: torch.zeros_like(parameter, dtype=torch.float32) for key in ("moment1", "moment2")}
    shape = _scales(parameter.shape)
    state: dict[str, Any] = {"step": 0}
    for key in "12":
        state[f"moment{key}"] = torch.zeros_like(parameter, dtype=torch.uint8)
        state[f"scales{key}"] = (
            zero_shards(shape, device_mesh=parameter.device_mesh, placements=[Shard(0)])
            if isinstance(parameter, DTensor)
            else torch.zeros(shape, device=parameter.device)
        )
    return state


def moment_bytes(shapes: Iterable[tuple[int, ...]], ranks: int = 1) -> int:
    """Bytes of the moments of tensors with the given shapes, sharded over `ranks` ranks, on all of them together."""
    return sum(
        2 * (math.prod(shape) + 4 * math.prod(_scales(shape))) if _in_codes(shape, ranks) else 8 * math.prod(shape)
        for shape in shapes
    )


def same_kind(moments: Mapping[str, Mapping[str, Any]], optimizer: str) -> bool:
    """Whether saved moments, by parameter name, come from the kind of optimizer that `train.optimizer` names."""
    return all((_MOMENT in state) == (optimizer == "adamw_8bit") for state in moments.values() if state)
