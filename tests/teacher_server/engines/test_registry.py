"""Engines are found by name without importing any of them."""

import subprocess
import sys

import pytest

from opd.errors import ConfigError
from teacher_server.engines import ENGINES


def test_listing_engines_imports_no_torch() -> None:
    code = (
        "import sys; from teacher_server.engines import ENGINES; names = [e.name for e in ENGINES];"
        "assert {'transformers', 'vllm', 'sglang'} <= set(names), names;"
        "assert not {'torch', 'transformers', 'vllm', 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_engine_prints_near_matches() -> None:
    with pytest.raises(ConfigError, match="transformers"):
        ENGINES.load("transformer")
