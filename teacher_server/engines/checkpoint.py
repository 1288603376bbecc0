"""Read single tensors and headers of a safetensors folder, without building a model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opd.errors import ConfigError, IncompatibleTeacherError
from opd.heads import OutputHead, scale_and_cap
from opd.wire.fingerprint import weights_hash
from teacher_server.engines.base import TokenizerIdentity
from teacher_server.engines.loading import counted_ids

Header = dict[str, tuple[Path, tuple[int, ...], str]]


def read_header(folder: Path) -> Header:
    """Name -> (file, shape, dtype) of every tensor in the folder's safetensors files.

    Raises:
        ConfigError: when there is no such file, or one is damaged.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model folder {folder} holds no *.safetensors file; save the model as safetensors.")
    header: Header = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                    part = tensors.get_slice(name)
                    header[name] = (file, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"weights file {file} cannot be read: {error}; save it again.") from error
    return header


def check_same_tensors(old: Header, new: Header, folder: Path) -> None:
    """Refuse weights whose names or shapes are not those of the weights in use.

    Raises:
        IncompatibleTeacherError: naming the first tensor that differs.
    """
    for name in sorted(old.keys() | new.keys()):
        ours, theirs = (header[name][1] if name in header else None for header in (old, new))
        if ours != theirs:
            raise IncompatibleTeacherError(
                f"weights in {folder} do not fit: tensor {name} has shape {theirs} there and {ours} here; load them as "
                "a new teacher."
            )


def check_unchanged(folder: Path, expected: str) -> None:
    """Check that a folder still holds the weights that were once read from it.

    Raises:
        ConfigError: when their hash is not `expected`.
    """
    found = weights_hash(folder)
    if found != expected:
        raise ConfigError(f"weights in {folder} changed from {expected} to {found}; the ones in use before are lost.")


def load_head(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, tokenizer: TokenizerIdentity
) -> OutputHead:
    """The output head of a model folder, cast to `dtype`; a head tied to the embeddings is found there.

    Only the rows of the tokenizer's ids count.

    Raises:
        ConfigError: when the folder's tensors do not include it.
    """
    from transformers import AutoModelForCausalLM

    # For the names and shapes alone: no memory, no weights.
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(tensor): name for name, tensor in model.named_parameters(remove_duplicate=False)}
    header = read_header(folder)
    name = names.get(id(head.weight), "")
    # `lm_head.weight` is a name of its own even where the checkpoint stores the embeddings only.
    for candidate in (name, "lm_head.weight", names.get(id(embeddings.weight), ""), "model.embed_tokens.weight"):
        if candidate in header and header[candidate][1] == tuple(head.weight.shape):
            weight = _read(header, candidate).to(device, dtype)
            break
    else:
        raise ConfigError(f"model folder {folder} has no tensor {name or 'lm_head.weight'} for the output head.")
    bias = None
    if getattr(head, "bias", None) is not None:
        bias = _read(header, names[id(head.bias)]).to(device, dtype)
    scale, cap = scale_and_cap(config.get_text_config())
    return OutputHead(weight, bias, scale, cap, padding=len(weight) - counted_ids(tokenizer, len(weight)))


def _read(header: Header, name: str) -> Tensor:
    from safetensors import safe_open

    if name not in header:
        raise ConfigError(f"weights hold no tensor {name}; save the model again.")
    with safe_open(header[name][0], framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
