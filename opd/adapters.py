"""PEFT adapters: parsing BASE+ADAPTER, refusing adapters that cannot be used, and merging one into its base."""

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, one_line

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HEAD_PARTS = ("lm_head", "embed_tokens", "embed_out", "wte")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds a PEFT adapter and no model."""
    folder = Path(folder).expanduser()
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def split_adapter(model: str) -> tuple[str, Path | None]:
    """The base of a model, and the folder of its adapter for BASE+ADAPTER, else None."""
    base, plus, adapter = model.rpartition("+")
    if not plus or not base or not adapter or Path(model).expanduser().exists():
        return model, None
    return base, Path(adapter).expanduser()


def adapter_settings(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a LoRA or DoRA adapter.

    Raises:
        ConfigError: if the folder holds no adapter or one of another kind, or if the adapter changes the head or the
            embeddings, which are read here without it, so that the change would be ignored.
    """
    path = folder / ADAPTER_CONFIG
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not the folder of a PEFT adapter: {path.name} cannot be read.") from error
    if found.get("peft_type") != "LORA":
        raise ConfigError(
            f"adapter {folder} is of PEFT type {found.get('peft_type')}, but only LoRA and DoRA adapters can be used."
        )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"adapter {folder} has no {ADAPTER_WEIGHTS}; save it as safetensors.")
    named = [*_names(found.get("target_modules")), *_names(found.get("modules_to_save"))]
    named += _names(found.get("trainable_token_indices"))
    head = [name for name in named if name.rpartition(".")[2] in _HEAD_PARTS]
    if head:
        raise ConfigError(
            f"adapter {folder} changes {head[0]}, but output heads and embeddings are read without the adapter; train "
            "an adapter that leaves them out."
        )
    return found


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(name) for name in value] if isinstance(value, list | tuple | dict) else []


def import_peft() -> Any:
    """The module peft.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"adapters need peft ({error}); install it with pip install 'opd[lora]'.") from None
    return peft


def fold_adapter(model: Any, folder: Path) -> Any:
    """The model with the adapter added to its weights, in place; the result is a plain model.

    Each sum is computed in float32 and rounded once to the model's dtype, so that for a bfloat16 base nothing is lost
    beyond the rounding of the sum. It equals the adapter's own forward pass up to rounding (2e-7 in float32).

    Args:
        model: a causal LM of transformers, without adapters.
        folder: the folder of the adapter.

    Raises:
        ConfigError: if the adapter cannot be used or belongs to another model.
    """
    settings = adapter_settings(folder)
    peft = import_peft()
    from peft.tuners.tuners_utils import BaseTunerLayer

    try:
        with patterns_are_ours_to_check():
            wrapped = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=True)
    except Exception as error:  # peft passes on what torch raises: RuntimeError for shapes, ValueError for names
        reason = one_line(error, 300)
        raise ConfigError(f"adapter {folder} does not fit its base model: {reason}.") from error
    _check_patterns(wrapped, settings, folder)
    for layer in wrapped.modules():
        if isinstance(layer, BaseTunerLayer):
            weight: Any = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
            dtype = weight.dtype
            weight.data = weight.data.float()
            layer.merge()
            weight.data = weight.data.to(dtype)
    return wrapped.unload().requires_grad_(False)


@contextmanager
def patterns_are_ours_to_check() -> Iterator[None]:
    """Silence PEFT's warning of ignored patterns of rank and alpha, which it also gives for those that it follows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        yield


def _check_patterns(wrapped: Any, settings: dict[str, Any], folder: Path) -> None:
    """Refuse ranks and alphas of layers that the model has joined with others, as transformers joins those of experts.

    Raises:
        ConfigError: naming one.
    """
    layers = [(name.removesuffix(".base_layer"), m) for name, m in wrapped.named_modules() if hasattr(m, "lora_A")]
    joined = [f"{name}.{layer.parameter_name}" for name, layer in layers if hasattr(layer, "parameter_name")]
    names = [name for name, _ in layers] + joined
    parts = sorted({name.rpartition(".")[2] for name in joined} - {"weight"})
    for pattern in ("rank_pattern", "alpha_pattern") if joined else ():
        for key, value in (settings.get(pattern) or {}).items():
            if not any(re.fullmatch(rf"(.*\.)?({key})", name) for name in names):
                raise ConfigError(
                    f"adapter {folder} gives {key} {pattern.removesuffix('_pattern')} {value}, but its base has no "
                    f"layer of that name: weights of experts are joined ({', '.join(parts)}); use an adapter without "
                    f"{pattern}."
                )
