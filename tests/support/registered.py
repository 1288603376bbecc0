"""What is registered, as parameters of tests: the trunk's run with `make test`, the zoo's with `make test-zoo`."""

from collections.abc import Iterable
from typing import Any

import pytest

from opd.registry import Registry


def registered(registry: Registry, entries: Iterable[dict[str, Any]] | None = None) -> list[Any]:
    """A parameter for every registered name, or for every one of `entries`; what the zoo registers bears its mark.

    Args:
        registry: of the kind of plug-in that the tests are of.
        entries: settings with the `name` of a plug-in, as a recipe has them.
    """
    paths = {entry.name: entry.path for entry in registry}
    if entries is None:
        return [pytest.param(name, id=name, marks=_marks(path)) for name, path in paths.items()]
    return [
        pytest.param(entry, id="-".join(map(str, entry.values())), marks=_marks(paths[entry["name"]]))
        for entry in entries
    ]


def _marks(path: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.zoo] if path.startswith("opd_zoo.") else []
