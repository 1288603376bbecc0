"""The tensors that are written for servers, and the candidates that are taken from their answers."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from opd.adapters import ADAPTER_WEIGHTS
from student.model.lora import adapter_tensors
from student.model.ranks import Ranks
from student.model.sharding import FILE_BYTES, in_files
from student.rollout.held_update import HeldUpdate
from student.rollout.weights import as_saved, checkpoint_tensors, chunks


@torch.no_grad()
def written(
    model: PreTrainedModel, parameters: Mapping[str, Tensor], dtype: str, held: HeldUpdate, *, adapters: bool
) -> tuple[dict[str, Tensor], str, tuple[str, str]]:
    """What to write for servers: tensors on the host, the contents of the JSON file, and the names of both files.

    Args:
        model: the student.
        parameters: trained parameters by name, unsharded, which replace the model's own of the same name.
        dtype: dtype of whole weights; adapters keep theirs.
        held: looks at whole weights before they are rounded.
        adapters: whether to write a PEFT adapter instead of a whole model.
    """
    if adapters:
        tensors, config = adapter_tensors(model, parameters)
        return (
            {name: _host(t) for name, t in tensors.items()},
            json.dumps(config),
            (ADAPTER_WEIGHTS, "adapter_config.json"),
        )
    kind: torch.dtype = getattr(torch, dtype)
    found = {name: _host(t, kind) for name, t in held.through(checkpoint_tensors(model, parameters.items()))}
    return found, model.config.to_json_string(), ("model.safetensors", "config.json")


def shares(
    model: PreTrainedModel,
    parameters: Iterable[tuple[str, Tensor]],
    dtype: str,
    held: HeldUpdate,
    ranks: Ranks,
    limit: int = FILE_BYTES,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The files of a sharded student, one per rank and round: this rank's file name and tensors, empty without a file.

    Every rank must iterate over all of them, because all ranks gather each tensor and the rank that writes it keeps it.
    """
    kind: torch.dtype = getattr(torch, dtype)
    files = in_files(chunks(model, parameters), limit, kind.itemsize)
    for start in range(0, len(files), ranks.count):
        kept: dict[str, Tensor] = {}
        # Every rank gathers every tensor, even those that others write; if it skipped one, the others would hang.
        for owner, file in enumerate(files[start : start + ranks.count]):
            for chunk in file:
                found = as_saved(model, chunk)
                if owner == ranks.index:
                    kept |= {name: _host(tensor, kind) for name, tensor in held.through(found.items())}
        yield f"model-{start + ranks.index + 1:05d}.safetensors", kept


def _host(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    kept = tensor.detach().to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
    # safetensors refuses tensors that share memory, as a tied head does.
    return kept.contiguous().clone() if kept.data_ptr() == tensor.data_ptr() else kept.contiguous()


def chosen(top: Sequence[int], count: int, keep: Sequence[int]) -> NDArray[np.uint32]:
    """`count` candidates of a position; ids of `keep` that are not in `top` replace the least likely ones, at the end.

    Args:
        top: the most likely ids in descending order of probability, at least `count`.
        count: number of candidates.
        keep: ids that must be among them.
    """
    missing = [token for token in keep if token not in top]
    ranked = list(top[:count])
    for token in reversed(top[:count]):
        if len(ranked) + len(missing) <= count:
            break
        if token not in keep:
            ranked.remove(token)
    return np.array([*ranked, *missing], np.uint32)
