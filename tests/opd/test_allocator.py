"""Segments of GPU memory grow, unless someone has decided otherwise or memory pools need them as they are."""

import os

import pytest

from opd.allocator import grow_segments

NAME = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (NAME, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_segments_grow_but_not_beside_memory_pools() -> None:
    grow_segments(pools=True)
    assert NAME not in os.environ
    grow_segments(pools=False)
    assert os.environ[NAME] == "expandable_segments:True"
    grow_segments(pools=True)  # in a process that this one starts
    assert NAME not in os.environ


@pytest.mark.parametrize("name", [NAME, "PYTORCH_ALLOC_CONF"])
def test_a_setting_that_is_there_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    for pools in (False, True):
        grow_segments(pools=pools)
    assert {key: os.environ.get(key) for key in (NAME, "PYTORCH_ALLOC_CONF") if key in os.environ} == {
        name: "max_split_size_mb:128"
    }
