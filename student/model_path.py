"""Is there a model at `model.path`? Asked before anything heavy is imported."""

from pathlib import Path

from opd.adapters import adapter_settings, split_adapter
from opd.errors import ConfigError
from opd.model_path import refuse_missing


def check_model_path(path: str, revision: str | None = None) -> None:
    """Refuse a path that is not there, and a bare name that is neither a folder nor a model in the hub's cache.

    Ids like OWNER/NAME are left to the hub.

    Args:
        path: folder or hub id, or BASE+ADAPTER with the folder of a PEFT adapter.
        revision: of a hub id.

    Raises:
        ConfigError: naming what the path could have been.
    """
    base, adapter = split_adapter(path)
    if adapter is not None:
        adapter_settings(adapter)
        path = base
    refuse_missing(path)
    if "/" in path or Path(path).exists():
        return
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
        return
    raise ConfigError(
        f"model {path!r} is not a folder here, and the hub's cache has no model of that name; give a folder, or an id "
        "with its owner, like Qwen/Qwen3-1.7B."
    )
