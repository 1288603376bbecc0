"""Packages that only some features need are asked for before anything begins."""

import pytest

from opd.errors import ConfigError
from opd.extras import has, require


def test_a_missing_package_is_named_with_what_needs_it_and_the_command() -> None:
    require("this", "json", "none")
    said = r"tracing needs no_such, which is not installed; install it with pip install 'opd\[x\]', or stop\."
    with pytest.raises(ConfigError, match=said):
        require("tracing", "no_such.sdk", "x", "stop")
    assert has("importlib.metadata") and not has("no_such.at.all") and not has("json.none")
