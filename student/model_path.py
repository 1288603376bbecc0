"""Checks that there can be a model at `model.path`, before anything slow is imported."""

from opd.adapters import adapter_settings, split_adapter
from opd.model_path import refuse_missing


def check_model_path(path: str) -> None:
    """Refuse a model that cannot exist.

    Ids of the form OWNER/NAME are not looked up; the hub reports them when the model is loaded.

    Args:
        path: folder or hub id of a model, or BASE+ADAPTER with the folder of a PEFT adapter.

    Raises:
        ConfigError: if there is no such model; the message says what the path could be.
    """
    base, adapter = split_adapter(path)
    if adapter is not None:
        adapter_settings(adapter)
    refuse_missing(base)
