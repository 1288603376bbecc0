"""PEFT adapters: parsing BASE+ADAPTER, refusing adapters that cannot be used, and merging one into its base."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, one_line
from opd.model_files import check_files
from opd.pretrained import refuse_wrapped, some

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NOT_ADDED = ("layer_replication", "alora_invocation_tokens", "arrow_config", "use_qalora")
"""Settings with which an adapter adds nothing to the weights that could be stored in them."""


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
        ConfigError: if the folder holds no adapter or one of another kind, or an adapter that weights cannot hold.
    """
    path = folder / ADAPTER_CONFIG
    check_files(folder)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = found.get("peft_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        inside = [each.parent.name for each in sorted(folder.glob(f"*/{ADAPTER_CONFIG}"))]
        hint = f"; did you mean {folder}/{inside[0]}?" if inside else "."
        raise ConfigError(f"{folder} is not the folder of a PEFT adapter: {path.name} cannot be read{hint}") from error
    if kind != "LORA":
        raise ConfigError(f"adapter {folder} is of PEFT type {kind}, but only LoRA and DoRA adapters can be used.")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"adapter {folder} has no {ADAPTER_WEIGHTS}; save it as safetensors.")
    for key in _NOT_ADDED:
        if found.get(key):
            raise ConfigError(
                f"adapter {folder} has {key} {one_line(found[key], 60)}, which cannot be merged into weights; train an "
                "adapter without it."
            )
    return found


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
        ConfigError: if the adapter cannot be used, belongs to another model, lacks tensors or has others, or changes
            weights that the model uses in two places or that are quantized.
    """
    settings = adapter_settings(folder)
    peft = import_peft()
    from peft.tuners.tuners_utils import BaseTunerLayer

    tied = _tied(model)
    try:
        with patterns_are_ours_to_check():
            wrapped = peft.PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=True)
            # Again, because this call returns which tensors did not fit.
            loaded = wrapped.load_adapter(str(folder), wrapped.active_adapter)
    except Exception as error:  # peft passes on what torch raises: RuntimeError for shapes, ValueError for names
        reason = one_line(error, 300)
        raise ConfigError(f"adapter {folder} does not fit its base model: {reason}.") from error
    missing = [name.replace(f".{wrapped.active_adapter}.", ".") for name in loaded.missing_keys]  # as in its file
    refuse_wrapped(missing, loaded.unexpected_keys, f"adapter {folder}")
    for problem, names in {"lacks": missing, "has in excess": loaded.unexpected_keys}.items():
        if names:
            raise ConfigError(f"adapter {folder} does not fit its base model: it {problem} {some(sorted(names))}.")
    _check_patterns(wrapped, settings, folder)
    _check_tied(wrapped, tied, folder)
    for layer in wrapped.modules():
        if isinstance(layer, BaseTunerLayer):
            try:
                _merge(layer)
            except Exception as error:  # peft's layers raise many classes
                reason = one_line(error, 200)
                raise ConfigError(f"adapter {folder} cannot be merged into its base model: {reason}.") from error
    return wrapped.unload().requires_grad_(False)


def _merge(layer: Any) -> None:
    """Add what a layer of PEFT has learned to the weight of its base, in float32.

    Raises:
        TypeError: if the weight is quantized.
    """
    weight: Any = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    dtype = weight.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise TypeError(f"its weights are quantized ({dtype}); name the model that they were made from as the base")
    weight.data = weight.data.float()
    layer.merge()
    weight.data = weight.data.to(dtype)


def _tied(model: Any) -> dict[int, list[str]]:
    """The names of the modules that hold a parameter, by its id, for those that several hold."""
    held: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            held.setdefault(id(parameter), []).append(name)
    return {parameter: names for parameter, names in held.items() if len(names) > 1}


def _check_tied(wrapped: Any, tied: Mapping[int, Sequence[str]], folder: Path) -> None:
    """Refuse an adapter that changes one of several modules with the same weight, as head and embeddings often have.

    Raises:
        ConfigError: naming them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in wrapped.named_modules():
        if isinstance(module, BaseTunerLayer):
            changed: Any = module.get_base_layer()
        elif isinstance(module, AuxiliaryTrainingWrapper):
            changed = module.original_module
        else:
            continue
        for parameter in changed.parameters():
            if id(parameter) in tied:
                raise ConfigError(
                    f"adapter {folder} changes {name.removeprefix('base_model.model.')}, but its base model has one "
                    f"weight for {' and '.join(tied[id(parameter)])}, which merging would change for both; train an "
                    "adapter that leaves them out."
                )


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
