"""The Hugging Face folder of a sharded student, that plain transformers or peft loads: no rank ever holds all of it.

Tensors are gathered layer by layer, and each file is kept and written by one rank: a rank holds a file at most.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from student.learning.lora import has_lora
from student.learning.model import Student
from student.learning.ranks import Ranks
from student.learning.sharding import full, layer_of, reshard

FILE_BYTES = 4 * 2**30


def save_model(folder: Path, student: Student, ranks: Ranks, *, limit: int = FILE_BYTES) -> None:
    """Write a sharded student, or its adapter, below `folder`; every rank calls it.

    Args:
        folder: visible to every rank.
        student: sharded.
        ranks: all ranks.
        limit: bytes of a file, unless one layer is larger.

    Raises:
        OSError: when this rank cannot write.
    """
    reshard(student)
    lm = student.lm
    if has_lora(lm):
        adapter = {name: full(p.detach()).cpu() for name, p in lm.named_parameters() if p.requires_grad}
        if ranks.index == 0:
            lm.save_pretrained(folder, state_dict=adapter)
        return
    files = _files(lm, limit)
    if ranks.index == 0:
        _describe(folder, lm, files)
    ranks.gather(None)  # the folder is there
    failure: Exception | None = None
    for start in range(0, len(files), ranks.count):
        kept: dict[str, Tensor] = {}
        for owner, chunks in enumerate(files[start : start + ranks.count]):
            for chunk in chunks:
                tensors = {name: full(tensor.detach()) for name, tensor in chunk.items()}
                if owner == ranks.index:
                    kept |= {n: t.cpu().contiguous() for n, t in revert_weight_conversion(lm, tensors).items()}
        mine = start + ranks.index
        if mine < len(files) and failure is None:
            try:
                save_file(kept, folder / _name(mine, len(files)), metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                failure = error  # the others are waiting in the next gather
    if failure is not None:
        raise failure


Chunk = dict[str, Tensor]


def _files(lm: PreTrainedModel, limit: int) -> list[list[Chunk]]:
    """The tensors of each file, in chunks that are gathered together: a layer, or a tensor outside the layers."""
    chunks: dict[str, Chunk] = {}
    for name, tensor in _saved(lm):
        layer = layer_of(name)
        chunks.setdefault(name if layer is None else f"layer {layer}", {})[name] = tensor
    files: list[list[Chunk]] = []
    left = 0
    for chunk in chunks.values():
        size = sum(tensor.numel() * tensor.element_size() for tensor in chunk.values())
        if not files or size > left:
            files.append([])
            left = limit
        files[-1].append(chunk)
        left -= size
    return files


def _saved(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters, tied ones once, and the buffers that are saved."""
    known = {name for name, _ in lm.named_parameters()}
    left_out = set(lm._keys_to_ignore_on_save or ())
    tied = set(lm.all_tied_weights_keys) - known
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if name not in tied and name not in left_out:
            yield name, tensor


def _describe(folder: Path, lm: PreTrainedModel, files: Sequence[Sequence[Chunk]]) -> None:
    """Everything but the weights, as `save_pretrained` writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    lm.config.dtype = str(lm.dtype).removeprefix("torch.")
    lm.config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    lm.config.save_pretrained(folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    if len(files) == 1:
        return
    places: dict[str, str] = {}
    for number, chunks in enumerate(files):
        for chunk in chunks:
            shapes: Mapping[str, Any] = {
                n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in chunk.items()
            }
            places |= dict.fromkeys(revert_weight_conversion(lm, dict(shapes)), _name(number, len(files)))
    size = sum(t.numel() * t.element_size() for chunks in files for chunk in chunks for t in chunk.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _name(number: int, count: int) -> str:
    if count == 1:
        return str(SAFE_WEIGHTS_NAME)
    return SAFE_WEIGHTS_NAME.replace(".safetensors", f"-{number + 1:05d}-of-{count:05d}.safetensors")
