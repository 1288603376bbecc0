"""Settings: pydantic models, YAML files, dotted overrides, and errors that name the key."""

from opd.config.base import Settings, with_defaults
from opd.config.load import load_settings, parse_settings

__all__ = ["Settings", "load_settings", "parse_settings", "with_defaults"]
