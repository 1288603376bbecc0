"""The folder from which rollout servers load the student's weights."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from opd.errors import RolloutEngineError
from student.rollout.servers.folder import WeightsFolder

WEIGHTS = {"w": torch.zeros(64, 64)}
FILES = ("model.safetensors", "config.json")


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Files of this process end at `size` bytes, as they would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_do_not_fit_leave_nothing_and_can_be_written_later(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path / "weights")
    with files_of_at_most(1000), pytest.raises(RolloutEngineError, match=r"cannot be written to \S+/weights \("):
        folder.put(WEIGHTS, "{}", FILES)
    assert [path.suffix for path in folder.root.iterdir()] == [".lock"]
    _, written = folder.put(WEIGHTS, "{}", FILES)
    assert sorted(path.name for path in written.iterdir()) == sorted(FILES)
    folder.close()
    assert not folder.root.exists()
