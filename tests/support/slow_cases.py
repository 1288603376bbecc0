"""Cases of a test that `make test-slow` runs, beside those of the same kind that every run has."""

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """The parameters marked slow: a tuple holds the values of several names."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
