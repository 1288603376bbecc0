"""Reading single tensors and headers of a safetensors folder, without building a model."""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """Map from tensor name to (file, shape, dtype), over the folder's safetensors files.

    Raises:
        ConfigError: if there is no such file, or one is damaged.
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
                f"weights in {folder} do not fit the teacher: tensor {name} has shape {theirs} there and {ours} in the "
                "teacher (None: it is missing); load them as a new teacher."
            )


def check_unchanged(folder: Path, expected: str) -> None:
    """Check that a folder still holds the weights that were once read from it.

    Raises:
        ConfigError: if their hash is not `expected`.
    """
    found = weights_hash(folder)
    if found != expected:
        raise ConfigError(
            f"the weights in {folder} have changed from {expected} to {found} since they were loaded, so the former "
            "cannot be restored; load the teacher again."
        )


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Where a folder of one architecture holds the output head, and what is done to its logits.

    Attributes:
        weight: names that the weight may have, including those of the embeddings if the head is tied to them.
        bias: names that the bias may have; empty if there is none.
        scale, soft_cap: see `OutputHead`.
    """

    weight: tuple[str, ...]
    bias: tuple[str, ...]
    scale: float
    soft_cap: float

    @classmethod
    def of(cls, config: Any) -> "HeadLayout":
        """The layout for a transformers config, found by building the model on the meta device, without memory."""
        from transformers import AutoModelForCausalLM
        from transformers.core_model_loading import revert_weight_conversion

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()

        def names(tensor: Any) -> tuple[str, ...]:
            found = {name: t for name, t in model.named_parameters(remove_duplicate=False) if t is tensor}
            # Files have other names if transformers has renamed layers since (GPT-NeoX), and names without the prefix
            # if they were saved from the base model alone (GPT-2 on the hub).
            bare = [name.removeprefix(f"{model.base_model_prefix}.") for name in found]
            return (*found, *revert_weight_conversion(model, found), *bare)

        return cls(names(head.weight), names(getattr(head, "bias", None)), *scale_and_cap(config.get_text_config()))


def load_head(
    folder: Path, layout: HeadLayout, dtype: torch.dtype, device: torch.device, tokenizer: TokenizerIdentity
) -> OutputHead:
    """The output head of a model folder, cast to `dtype`; rows beyond the tokenizer's ids become padding.

    Raises:
        ConfigError: if the folder's tensors do not include the head.
    """
    header = read_header(folder)
    weight = _read(header, layout.weight, folder).to(device, dtype)
    bias = _read(header, layout.bias, folder).to(device, dtype) if layout.bias else None
    padding = len(weight) - counted_ids(tokenizer, len(weight))
    return OutputHead(weight, bias, layout.scale, layout.soft_cap, padding)


def _read(header: Header, names: Sequence[str], folder: Path) -> Tensor:
    """The tensor under the first of `names` that exists."""
    from safetensors import safe_open

    name = next((name for name in names if name in header), None)
    if name is None:
        raise ConfigError(f"model folder {folder} has no tensor {names[0]} for the output head; save the model again.")
    with safe_open(header[name][0], framework="pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
    return tensor
