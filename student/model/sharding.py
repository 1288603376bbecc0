"""Sharded students (FSDP2, torch's `fully_shard`): each rank keeps a shard of the weights, gradients and moments.

    The forward pass gathers one layer at a time; head, embeddings and final norm stay gathered until the backward pass.
    The backward pass averages gradients over the ranks as it scatters them, as DDP does, shard by shard.

With `train.mixed_precision: bf16`, layers are gathered and run in bfloat16, while shards, gradients and moments keep
the dtype of the weights: float32 master weights then cost 16 bytes per parameter over all ranks together, not on each.
Ranks may make different numbers of forward passes only within `whole`, which holds all weights on every rank, and
without gradients.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from student.data.hooks import decoder_layers
from student.model.model import Student

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")

Chunk = dict[str, Tensor]
"""Tensors by the names that they have in the model, sharded or not."""
FILE_BYTES = 4 * 2**30
"""Of a file of a sharded student, unless a layer is larger: what a rank holds whole at most."""


def shard(student: Student, device: torch.device, *, half: bool) -> Callable[[], None]:
    """Shard a student over all ranks, in place, before its optimizer is made.

    Args:
        student: the student, with the same weights on every rank.
        device: this rank's device, which holds its shards.
        half: gather and run the layers in bfloat16.

    Returns:
        A callback that closes the process group, if one was opened here.

    Raises:
        RuntimeError: if torch left a tensor unsharded.
    """
    alone = not dist.is_initialized()
    if alone:  # one process without a launcher: a group of its own
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = torch.bfloat16 if half else None
    # Gradients are averaged in float32, even those of layers that run in bfloat16.
    layers = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Hidden states are returned in float32, as by accelerate's wrapper of an unsharded student.
    root = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32 if half else None
    )
    # Layers first: `fully_shard` leaves out what inner modules manage, so the student itself manages the rest.
    for module in decoder_layers(student.lm):
        fully_shard(module, mesh=mesh, mp_policy=layers)
    fully_shard(student, mesh=mesh, mp_policy=root)
    left = [name for name, parameter in student.named_parameters() if not isinstance(parameter, DTensor)]
    if left:
        raise RuntimeError(f"fully_shard left {len(left)} tensors whole on every rank, {left[0]} first")
    with torch.no_grad():  # the first forward decides which module is the root
        token = torch.ones((1, 1), dtype=torch.long, device=device)
        student(token, token, *torch.zeros((2, 1), dtype=torch.long, device=device))
    reshard(student)
    return dist.destroy_process_group if alone else lambda: None


def units(student: nn.Module) -> list[FSDPModule]:
    """The modules whose parameters are gathered together, the student itself first; empty if it is not sharded."""
    return [module for module in student.modules() if isinstance(module, FSDPModule)]


def mesh_of(student: nn.Module) -> DeviceMesh | None:
    """The device mesh over which a student is sharded; None if it is not."""
    return next((p.device_mesh for p in student.parameters() if isinstance(p, DTensor)), None)


def reshard(student: nn.Module) -> None:
    """Make the student's parameters its shards again; after a forward pass, those of the root are gathered tensors."""
    for module in units(student):
        module.reshard()


def recover(student: nn.Module) -> None:
    """Reset a student whose forward or backward pass ended in an error: its parameters are the shards again.

    Otherwise torch would treat the next forward pass as a part of the failed one and keep what that had gathered.
    """
    modules = units(student)
    if modules and hasattr(modules[0], "reset_iter_state"):  # torch 2.13
        modules[0].reset_iter_state()
    reshard(student)


@contextmanager
def whole(student: nn.Module) -> Iterator[None]:
    """Hold all weights of a sharded student on every rank; does nothing if the student is not sharded.

    All ranks must enter it together. Within it, each rank may run any number of forward passes without gradients, of
    the student or of parts of it, but must not write to the parameters.
    """
    modules = units(student)
    if not modules:
        yield
        return
    try:
        for module in modules:
            # Weights left gathered by a forward pass would not be gathered again, and may be older than an update.
            module.reshard()
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        yield
    except BaseException:
        recover(student)
        raise
    finally:
        for layer in modules[1:]:  # the root is never resharded after its forward, because its backward follows at once
            layer.set_reshard_after_forward(True, recurse=False)
        reshard(student)


def placed(value: Tensor, like: Tensor) -> Tensor:
    """A copy of `value`, whole or sharded, with the device and the sharding of `like` and its own dtype."""
    if not isinstance(like, DTensor):
        plain = value.full_tensor() if isinstance(value, DTensor) else value
        return plain.to(like.device, copy=True)
    if isinstance(value, DTensor):
        return value.clone()
    value = value.to(like.device)
    # Every rank has the whole value and takes its own part, so nothing is sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).clone()


def layer_of(name: str) -> int | None:
    """The index of the decoder layer in a parameter's name; None for parameters outside the layers."""
    match = _LAYER.search(f".{name}")
    return None if match is None else int(match[1])


def in_chunks(tensors: Iterable[tuple[str, Tensor]]) -> list[Chunk]:
    """Tensors that are gathered and saved together: of a layer, or one outside the layers."""
    chunks: dict[str, Chunk] = {}
    for name, tensor in tensors:
        layer = layer_of(name)
        chunks.setdefault(name if layer is None else f"layer {layer}", {})[name] = tensor
    return list(chunks.values())


def in_files(chunks: Iterable[Chunk], limit: int, itemsize: int | None = None) -> list[list[Chunk]]:
    """The chunks of each file.

    Args:
        chunks: all of them, in order.
        limit: bytes of a file, unless one chunk is larger.
        itemsize: bytes of an element in the file; None for that of each tensor.
    """
    files: list[list[Chunk]] = []
    left = 0
    for chunk in chunks:
        size = sum(tensor.numel() * (itemsize or tensor.element_size()) for tensor in chunk.values())
        if not files or size > left:
            files.append([])
            left = limit
        files[-1].append(chunk)
        left -= size
    return files


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor; if it is sharded, every rank must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
