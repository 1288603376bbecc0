"""Reading and writing YAML, with libyaml if PyYAML was built with it, which is several times faster."""

import contextlib
from collections.abc import Iterable
from typing import Any

import yaml

from opd.errors import ConfigError

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def read_yaml(text: str) -> Any:
    """The value of a YAML document; creates only objects that plain YAML knows.

    Raises:
        yaml.YAMLError: if `text` is not YAML.
        ValueError: for a value that its tag does not allow, for example the date 2026-99-99.
    """
    # The same as yaml.load, a name that is avoided altogether because its loader decides whether data can run code.
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def read_options(flag: str, entries: Iterable[str] | None) -> dict[str, Any]:
    """The values of a flag that may be given several times as KEY=VALUE; values are YAML.

    Raises:
        ConfigError: for an entry that is not of this form.
    """
    options = {}
    for entry in entries or ():
        key, separator, value = entry.partition("=")
        if not separator or not key:
            raise ConfigError(f"{flag} {entry!r} must have the form KEY=VALUE.")
        try:
            options[key] = read_yaml(value)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{flag} {entry!r} is not valid YAML; quote the value.") from error
        if isinstance(options[key], str):
            # YAML 1.1 reads 1e-5, which has no dot, as a string.
            with contextlib.suppress(ValueError):
                options[key] = float(value)
    return options


def write_yaml(value: Any, *, allow_unicode: bool = False) -> str:
    """Plain values as a YAML document."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode))
