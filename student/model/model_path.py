"""Checks that there can be a model at `model.path`, before anything slow is imported."""

from opd.adapters import adapter_settings, split_adapter
from opd.model_path import refuse_missing


def check_model_path(path: str) -> None:
    """Refuse a model that cannot exist.

    Whether the hub has a model OWNER/NAME is seen when it is loaded; here it only must be possible to ask.

    Args:
        path: folder or hub id of a model, or BASE+ADAPTER with the folder of a PEFT adapter.

    Raises:
        ConfigError: if there is no such model; the message says what the path could be.
        UnavailableError: if it can only come from the hub, which cannot be reached.
    """
    base, adapter = split_adapter(path)
    if adapter is not None:
        adapter_settings(adapter)
    refuse_missing(base)
