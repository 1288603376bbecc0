"""Settings: pydantic models, YAML files, dotted overrides, and errors that name the key."""

from opd.config.base import Settings
from opd.config.load import load_settings, parse_settings

__all__ = ["Settings", "load_settings", "parse_settings"]
