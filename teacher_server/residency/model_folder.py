"""What can be known of a model before it is built: where its folder is, how large it is, and whether it is plausible.

A config that claims a billion layers would occupy a thread that cannot be interrupted, so it is first compared with the
tensors beside it, of which only the headers are read.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opd.errors import ConfigError
from opd.model_files import check_readable
from teacher_server.observe.logs import describe_error

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_HEADER_BYTES = 100_000_000
"""Limit on the header of a safetensors file, set by the format itself."""

LEAST_BYTES_PER_NUMBER = 0.25
"""Bytes per weight of the densest quantisation in use, 2 bits."""

_LAYERS = re.compile(r"n_layers?|num_layers|num_(\w+_)?layers|\w+_num_layers")
_TENSORS = (
    ("vocab_size", ("hidden_size", "n_embd", "d_model")),
    ("n_positions", ("n_embd",)),
    ("intermediate_size", ("hidden_size",)),
    ("num_attention_heads", ("head_dim",), ("hidden_size",)),
    ("num_experts", ("hidden_size",), ("moe_intermediate_size", "intermediate_size")),
    ("num_local_experts", ("hidden_size",), ("moe_intermediate_size", "intermediate_size")),
    ("n_routed_experts", ("hidden_size",), ("moe_intermediate_size", "intermediate_size")),
)
"""Keys of a config whose values multiply to the number of elements of a tensor that the model has.

Each entry is one tensor: a required key, then its other dimensions. A dimension is a tuple of alternative keys, of
which the first that is present counts.
"""


def local_folder(model: str) -> Path | None:
    """The local folder of a model: `model` itself, or the cached snapshot of a hub id; None if neither exists.

    Nothing is downloaded.

    Raises:
        ConfigError: if it is a path that cannot exist on this machine.
    """
    try:
        folder = Path(model).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise ConfigError(f"model {model[:200]!r} cannot be read: {reason}; give a folder or a hub id.") from error
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not a hub id, or not in the cache; many exception classes say so
        return None


def weight_bytes(folder: Path) -> int:
    """Bytes of a folder's safetensors files. An engine may allocate more or less, depending on its dtype."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def check_plausible(folder: Path) -> None:
    """Refuse a config that cannot belong to the tensors beside it. If either is missing, the engine decides.

    Raises:
        ConfigError: naming the key and the value, or a file that cannot be read.
    """
    check_readable(folder)
    config, tensors = _config(folder / "config.json"), _tensor_count(folder)
    if config is None or not tensors:
        return
    size = weight_bytes(folder)
    for part in _parts(config):
        for key, value in part.items():
            if _LAYERS.fullmatch(key) and isinstance(value, int) and value > tensors:  # a layer has at least one tensor
                raise ConfigError(
                    f"model {folder} is inconsistent: its config has {key} {value}, but its files hold {tensors} "
                    "tensors; save the model again."
                )
        for first, *others in _TENSORS:
            keys = [first, *(next((key for key in names if key in part), names[0]) for names in others)]
            sizes = [part.get(key) for key in keys]
            numbers = 1
            for value in sizes:
                numbers *= value if isinstance(value, int) else 0  # an absent size makes no claim
            if numbers * LEAST_BYTES_PER_NUMBER > size:
                names = " x ".join(f"{key} {value}" for key, value in zip(keys, sizes, strict=True))
                raise ConfigError(
                    f"model {folder} is inconsistent: its config has {names}, too large for safetensors files of "
                    f"{size} bytes; save the model again."
                )


def _config(file: Path) -> dict[str, Any] | None:
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"{file} has more than {MAX_CONFIG_BYTES} bytes, too many for a config; save the model again."
            )
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {describe_error(error)}; save the model again.") from error
    return found if isinstance(found, dict) else None


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config and the configs nested in it, for example that of a text model."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(value)


def _tensor_count(folder: Path) -> int:
    """Number of tensors in a folder's safetensors files; 0 if one cannot be read, which the engine will report."""
    count = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size):
                    return 0
                header = json.loads(stream.read(length))
        except (OSError, ValueError, RecursionError):
            return 0
        count += len(header.keys() - {"__metadata__"}) if isinstance(header, dict) else 0
    return count
