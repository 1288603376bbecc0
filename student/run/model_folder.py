"""Writes a student as a Hugging Face folder, which plain transformers or PEFT can load.

No rank ever holds all of a sharded student. Tensors are gathered layer by layer, and each file is kept and written by
one rank, which so holds at most one file, or its share of the files if they are written while training continues.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from student.model.lora import has_lora
from student.model.model import Student
from student.model.ranks import Ranks
from student.model.sharding import FILE_BYTES, Chunk, full, in_chunks, in_files, reshard, units
from student.state.parts import Part, files_written, nothing, on_host


def model_parts(
    name: str, student: Student, tokenizer: Any, ranks: Ranks, *, copied: bool = False, limit: int = FILE_BYTES
) -> Iterator[Part]:
    """The parts of a student, or of its adapter, and of its tokenizer that this rank writes.

    Args:
        name: name of the folder within the checkpoint.
        student: the student, sharded or the same on all ranks.
        tokenizer: saved with it.
        ranks: all ranks; they iterate over the parts together.
        copied: hold copies, all parts at the same time, so that they can be written while the student is trained.
        limit: maximum bytes of a file of a sharded student, unless one layer is larger.
    """
    # A forward pass leaves some tensors gathered, but all ranks must find the same shards below.
    reshard(student)
    lm, main = student.lm, ranks.index == 0
    weights: dict[str, Tensor] | None = None
    files: list[list[Chunk]] = []
    if has_lora(lm):
        weights = on_host({n: full(p.detach()) for n, p in lm.named_parameters() if p.requires_grad}, copied=copied)
    elif units(student):
        files = in_files(in_chunks(_saved(lm)), limit)
    elif copied and main:
        weights = on_host(lm.state_dict(), copied=True)
    index = _index(lm, files)

    def describe(folder: Path) -> list[Path]:
        place = folder / name

        def work() -> None:
            place.mkdir(parents=True, exist_ok=True)
            if files:
                _describe(place, lm, index)
            else:
                lm.save_pretrained(place, state_dict=weights)
            tokenizer.save_pretrained(place)

        return files_written(place, work)

    yield Part(name, describe) if main else nothing(name)
    # Gathering is collective: every rank takes part for every tensor, and keeps only those of its own file. Each round
    # gives every rank one file, so that ranks write in parallel and none holds more than one file.
    for start in range(0, len(files), ranks.count):
        kept: dict[str, Tensor] = {}
        for owner, chunks in enumerate(files[start : start + ranks.count]):
            for chunk in chunks:
                tensors = {n: full(tensor.detach()) for n, tensor in chunk.items()}
                if owner == ranks.index:
                    found = revert_weight_conversion(lm, tensors)
                    kept |= {n: t.to("cpu", copy=copied).contiguous() for n, t in found.items()}
        mine = start + ranks.index
        file = f"{name}/{_name(min(mine, len(files) - 1), len(files))}"
        yield Part(file, partial(_write, kept, file)) if mine < len(files) else nothing(file)


def _write(tensors: dict[str, Tensor], file: str, folder: Path) -> list[Path]:
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return [folder / file]


def _saved(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The parameters, tied ones once, and the persistent buffers."""
    known = {name for name, _ in lm.named_parameters()}
    left_out = set(lm._keys_to_ignore_on_save or ())
    tied = set(lm.all_tied_weights_keys) - known
    for name, tensor in lm.state_dict(keep_vars=True).items():
        if name not in tied and name not in left_out:
            yield name, tensor


def _index(lm: PreTrainedModel, files: Sequence[Sequence[Chunk]]) -> dict[str, Any] | None:
    """Hugging Face's index of which file holds which tensor; None for a single file."""
    if len(files) < 2:
        return None
    places: dict[str, str] = {}
    for number, chunks in enumerate(files):
        for chunk in chunks:
            shapes: Mapping[str, Any] = {
                n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in chunk.items()
            }
            places |= dict.fromkeys(revert_weight_conversion(lm, dict(shapes)), _name(number, len(files)))
    size = sum(t.numel() * t.element_size() for chunks in files for chunk in chunks for t in chunk.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}


def _describe(folder: Path, lm: PreTrainedModel, index: dict[str, Any] | None) -> None:
    """Write everything except the weights, as `save_pretrained` does."""
    lm.config.dtype = str(lm.dtype).removeprefix("torch.")
    lm.config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    lm.config.save_pretrained(folder)
    if lm.can_generate():
        lm.generation_config.save_pretrained(folder)
    if index is not None:
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _name(number: int, count: int) -> str:
    if count == 1:
        return str(SAFE_WEIGHTS_NAME)
    return SAFE_WEIGHTS_NAME.replace(".safetensors", f"-{number + 1:05d}-of-{count:05d}.safetensors")
