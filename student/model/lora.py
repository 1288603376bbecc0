"""LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353) students, with the layers and the folder format of PEFT.

    y = W x + (alpha / r) B A x        W frozen; A [r, in], B [out, r] trained, B = 0 at first

Only the factors are trained, saved, copied, and sent to rollout engines that hold weights of their own. They are always
float32, over a bfloat16 base too, because rounding to bfloat16 would lose small updates. With its adapters off, the
model is the base bit for bit, so the reference `initial` costs no memory. The head and the embeddings cannot be
targets: losses read the head's weight directly and would silently miss an adapter on it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from opd.adapters import ADAPTER_WEIGHTS, adapter_settings, import_peft, patterns_are_ours_to_check
from opd.errors import CheckpointError, ConfigError, one_line
from student.settings.model import LoraSettings

ADAPTER = "default"
_PREFIX = "base_model.model."
_BESIDE_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""PEFT's initialisations that leave the base weights as they are; others, such as pissa, subtract a part of them."""


def add_lora(lm: PreTrainedModel, settings: LoraSettings, *, base: str, revision: str | None = None) -> None:
    """Freeze `lm` and give it trainable factors, in place.

    Args:
        lm: a causal LM without adapters.
        settings: the recipe's `model.lora`.
        base: folder or hub id that `lm` was loaded from; the saved adapter refers to it.
        revision: revision of a hub id.

    Raises:
        ConfigError: if peft is not installed, or the targets match nothing, the head or the embeddings.
    """
    peft = import_peft()
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        use_dora=settings.dora,
        task_type="CAUSAL_LM",
    )
    try:
        with patterns_are_ours_to_check():
            lm.add_adapter(config, ADAPTER)
    except ValueError as error:
        reason = one_line(error, 200)
        raise ConfigError(f"model.lora.targets {settings.targets!r} does not fit this model: {reason}.") from error
    for name, module in (("head", lm.get_output_embeddings()), ("embeddings", lm.get_input_embeddings())):
        if any("lora_" in part for part, _ in module.named_parameters()):
            raise ConfigError(
                f"model.lora.targets {settings.targets!r} matches the {name}, whose adapter the losses would bypass; "
                "name only layers of attention and MLP, or set it to all-linear."
            )
    for name, parameter in lm.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # peft creates them in the dtype of the base
    saved: Any = lm.peft_config[ADAPTER]
    # PEFT's loaders read this: a folder is stored by its full path, so that the adapter loads from anywhere.
    saved.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    saved.revision = revision


def load_factors(lm: PreTrainedModel, folder: Path, settings: LoraSettings) -> None:
    """Copy the factors of a saved adapter into those of `lm`.

    Raises:
        ConfigError, CheckpointError: if it cannot be read, or differs from `settings` in rank, alpha, kind or targets.
    """
    own: Any = lm.peft_config[ADAPTER]
    check_same(adapter_settings(folder), settings, own.alpha_pattern, folder)
    try:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"adapter {folder} cannot be read: {error}.") from error
    saved = {_own_name(name): tensor for name, tensor in tensors.items()}
    mine = {name: parameter for name, parameter in lm.named_parameters() if "lora_" in name}
    for name in sorted(saved.keys() | mine.keys()):
        theirs, here = (list(side[name].shape) if name in side else None for side in (saved, mine))
        if theirs != here:
            raise CheckpointError(
                f"adapter {folder} does not fit model.lora: tensor {name} is {theirs} in the adapter and {here} here."
            )
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(saved[name])


def check_same(saved: dict[str, Any], settings: LoraSettings, alphas: Mapping[str, float], folder: Path) -> None:
    """Refuse an adapter whose shape, scale or base is not the recipe's.

    Args:
        saved: the contents of its adapter_config.json.
        settings: the recipe's `model.lora`.
        alphas: what peft itself gives layers of this model in place of alpha, such as joined experts.
        folder: for the message.

    Raises:
        CheckpointError: naming the first difference.
    """
    asked = {"rank": settings.rank, "alpha": settings.alpha, "dora": settings.dora}
    keys = {"rank": "r", "alpha": "lora_alpha", "dora": "use_dora"}
    for name, value in asked.items():
        found = saved.get(keys[name])
        if found != value:
            raise CheckpointError(
                f"adapter {folder} has {name} {found}, but model.lora.{name} is {value}; set it to {found}, or begin "
                "a new run."
            )
    # These do not show in the factors, and with each of them the same factors are a different model.
    odd = {key: saved[key] for key in ("use_rslora", "alpha_pattern") if saved.get(key)}
    if odd.get("alpha_pattern") == alphas:
        del odd["alpha_pattern"]
    if saved.get("init_lora_weights", True) not in _BESIDE_THE_BASE:
        odd["init_lora_weights"] = saved["init_lora_weights"]
    for key, value in odd.items():
        raise CheckpointError(
            f"adapter {folder} has {key} {value!r}, which model.lora cannot express, so its factors would be applied "
            "at another scale or over another base; merge it first (opd merge OUT BASE+ADAPTER) and start from the "
            "merged model."
        )


def _own_name(name: str) -> str:
    """The model's name for a saved factor; PEFT leaves the adapter's name out of its files."""
    name = name.removeprefix(_PREFIX)
    if name.endswith("lora_magnitude_vector"):
        return f"{name}.{ADAPTER}.weight"
    stem, _, last = name.rpartition(".")
    return f"{stem}.{ADAPTER}.{last}"


def adapter_tensors(lm: PreTrainedModel, given: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The factors under the names of PEFT's files, and the contents of adapter_config.json.

    Args:
        lm: a model with adapters.
        given: factors by name, which replace the model's own of the same name.
    """
    factors = {}
    for name, parameter in lm.named_parameters():
        if "lora_" in name:
            stem, _, last = name.rpartition(f".{ADAPTER}.")
            factors[f"{_PREFIX}{stem}.{last}"] = given.get(name, parameter).detach()
    settings: Any = lm.peft_config[ADAPTER]
    # JSON has no sets; sorted, so that equal adapters are equal files.
    saved = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.to_dict().items()}
    return factors, saved | {"inference_mode": True}


def sends_adapters(lm: PreTrainedModel) -> bool:
    """Whether a model has adapters that rollout engines can apply themselves: LoRA, but not DoRA."""
    configs: Any = getattr(lm, "peft_config", None) or {}
    return has_lora(lm) and not configs[ADAPTER].use_dora


def has_lora(lm: PreTrainedModel) -> bool:
    """Whether a model has adapters."""
    return bool(getattr(lm, "_hf_peft_config_loaded", False))


@contextmanager
def adapters_off(lm: PreTrainedModel) -> Iterator[None]:
    """Switch the adapters off, which leaves the base model bit for bit.

    This changes the state of the modules, so no other thread may run them meanwhile.
    """
    lm.disable_adapters()
    try:
        yield
    finally:
        lm.enable_adapters()
