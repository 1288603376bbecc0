"""Checks that there can be a model at `model.path`, before anything slow is imported."""

from pathlib import Path

from opd.adapters import adapter_settings, split_adapter
from opd.errors import ConfigError
from opd.model_path import refuse_missing


def check_model_path(path: str, revision: str | None = None) -> None:
    """Refuse a path that does not exist, or a bare name that is neither a folder nor a model in the hub's cache.

    Ids of the form OWNER/NAME are not looked up; the hub reports them when the model is loaded.

    Args:
        path: folder or hub id of a model, or BASE+ADAPTER with the folder of a PEFT adapter.
        revision: branch, tag or commit of a hub id.

    Raises:
        ConfigError: if there is no such model; the message says what the path could be.
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
        f"model {path!r} is not a folder here, and the hub's cache has no model of that name; name a folder, or a hub "
        "id with its owner, like Qwen/Qwen3-1.7B."
    )
