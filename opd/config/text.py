"""YAML in both directions, by libyaml where PyYAML was built with it: several times as fast as its Python code."""

from typing import Any

import yaml

_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def read_yaml(text: str) -> Any:
    """The value of a YAML document; no Python object is made that plain YAML does not know.

    Raises:
        yaml.YAMLError: when `text` is none.
        ValueError: for a value that its tag does not allow, as the date 2026-99-99.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def write_yaml(value: Any, *, sort_keys: bool = False, allow_unicode: bool = False) -> str:
    """Plain values as a YAML document."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=sort_keys, allow_unicode=allow_unicode))
