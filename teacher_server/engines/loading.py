"""Finding and loading a transformers model and its tokenizer: safetensors only, and no hub code unless allowed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opd.errors import ConfigError, IncompatibleTeacherError, NonFiniteError, one_line
from opd.model_path import hub_away, hub_is_away, refuse_missing
from opd.pretrained import read_causal_lm, read_tokenizer
from opd.tokenizer_files import has_tokenizer
from opd.wire.fingerprint import chat_template_hash, token_bytes, tokenizer_fingerprint
from opd.wire.tokenizer import document_of
from teacher_server.engines.base import TokenizerIdentity
from teacher_server.engines.head import DTYPE_NAMES

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Keys of a config that say where it came from or how it was loaded, but not what it computes.
_INCIDENTAL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache"}


def resolve_folder(model: str, revision: str | None, *, with_code: bool) -> Path:
    """The local folder of a model: `model` itself if it is one, else a snapshot of that hub id.

    Raises:
        ConfigError: if neither exists, or the folder has no config.json.
        UnavailableError: if the hub cannot be reached.
    """
    folder = Path(model).expanduser()
    refuse_missing(model)
    if not folder.is_dir():
        folder = _download(model, revision, with_code=with_code)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json; give the folder that save_pretrained wrote.")
    return folder


def _download(model: str, revision: str | None, *, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    # No pickles, and no code unless it is allowed to run.
    patterns = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"] + (["*.py"] if with_code else [])
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        if hub_is_away(error):
            raise hub_away(model) from error
        reason = one_line(error, 200)
        raise ConfigError(f"model {model!r} is neither a folder nor a hub id that can be fetched: {reason}.") from error


def pick_device(name: str) -> torch.device:
    """The device called `name`; "auto" is this machine's accelerator, or the CPU if it has none."""
    if name != "auto":
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"device {name!r} is not known to torch; use auto, cpu, cuda or cuda:0.") from error
        if not _is_here(device):
            raise ConfigError(
                f"device {name!r} is not available: this machine lacks it or torch was built without it; use auto or "
                "cpu."
            )
        return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator if accelerator is not None else torch.device("cpu")


def _is_here(device: torch.device) -> bool:
    """Whether a device can be used; it is not initialised by asking, which engines do in processes of their own."""
    try:
        module = torch.get_device_module(device)
        return bool(module.is_available()) and (device.index or 0) < module.device_count()
    except (AttributeError, RuntimeError):
        return False


def pick_dtype(name: str, device: torch.device, config: Any) -> torch.dtype:
    """The compute dtype called `name`; "auto" is that of the checkpoint on accelerators and f32 on the CPU.

    Few CPUs multiply bf16 or f16 as fast as f32.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype {name!r} is not known; use one of auto, {', '.join(_DTYPES)}.")
    stored: torch.dtype | None = getattr(config, "dtype", None)
    return stored if stored is not None and stored in DTYPE_NAMES and device.type != "cpu" else torch.float32


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """A causal language model in evaluation mode, with every tensor taken from the folder.

    Raises:
        ConfigError: if the folder cannot be loaded, or lacks tensors that the architecture needs.
    """
    # Straight to the device: by way of the host, the model would have to fit into host memory as well.
    options.update({"device_map": device} if device.type != "cpu" else {})
    # Safetensors only, because a pickle could run code.
    model = read_causal_lm(folder, config=config, dtype=dtype, use_safetensors=True, **options)
    return model.eval().requires_grad_(False)


def load_tokenizer_identity(folder: Path, *, trust_remote_code: bool) -> TokenizerIdentity:
    """The identity of the tokenizer that is saved with a model; an empty fingerprint if there is none.

    Raises:
        ConfigError: if there are tokenizer files but they cannot be read.
    """
    if not has_tokenizer(folder):
        return TokenizerIdentity("", "", 0)
    tokenizer = read_tokenizer(folder, trust_remote_code=trust_remote_code)
    vocabulary = tokenizer.get_vocab()
    return TokenizerIdentity(
        fingerprint=tokenizer_fingerprint(tokenizer),
        chat_template_hash=chat_template_hash(tokenizer),
        size=max(vocabulary.values()) + 1 if vocabulary else 0,
        eos_id=_id(tokenizer.eos_token_id),
        bos_id=_id(tokenizer.bos_token_id),
        pad_id=_id(tokenizer.pad_token_id),
        tokens=token_bytes(tokenizer),
        document=document_of(tokenizer),
    )


def counted_ids(tokenizer: TokenizerIdentity, rows: int) -> int:
    """How many of a head's `rows` rows count: one for each id of the tokenizer, or all if there is no tokenizer.

    The others pad the head to a round size. They were never trained, and a student with the same tokenizer does not
    have these ids, so probability that a softmax gives to them would be missing from the tokens.
    """
    return min(tokenizer.size, rows) if tokenizer.size else rows


def load_stop_token_ids(folder: Path, config: Any, tokenizer: TokenizerIdentity, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a response of the model, ascending: those of its generation config, and its tokenizer's EOS id.

    Most chat models list several in generation_config.json. Without that file the model's config counts, as in
    transformers. Ids outside the vocabulary can never be sampled and are left out.

    Raises:
        ConfigError: if generation_config.json cannot be read.
    """
    from transformers import GenerationConfig

    try:
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder)
        else:
            generation = GenerationConfig.from_model_config(config.get_text_config())
    except Exception as error:  # libraries raise many classes for a damaged file
        reason = one_line(error, 200)
        raise ConfigError(f"the generation_config.json of model {folder} cannot be read: {reason}.") from error
    listed = generation.eos_token_id
    found = {tokenizer.eos_id, *(listed if isinstance(listed, list | tuple) else [listed])}
    return tuple(sorted(i for i in found if isinstance(i, int) and 0 <= i < vocab_size))


def check_same_architecture(old: Any, new: Any, folder: Path) -> None:
    """Refuse a config with which the same tensors would compute something else.

    Raises:
        IncompatibleTeacherError: naming the first key that differs.
    """
    ours, theirs = _plain(old), _plain(new)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            raise IncompatibleTeacherError(
                f"weights in {folder} are of another architecture: their config has {key} {theirs.get(key)!r}, the "
                f"teacher's has {ours.get(key)!r}; load them as a new teacher."
            )


def check_finite(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights with NaN or infinity.

    Raises:
        NonFiniteError: naming the first such tensor.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise NonFiniteError(
                f"weights in {folder} hold NaN or infinity in tensor {name}; save a checkpoint whose values are finite."
            )


def _plain(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {key: value for key, value in values.items() if key not in _INCIDENTAL and not key.startswith("_")}


def _id(value: Any) -> int:
    return value if isinstance(value, int) else -1
