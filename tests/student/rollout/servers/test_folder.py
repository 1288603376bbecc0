"""The folder from which rollout servers load the student's weights."""

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from thread_ranks import Meeting

from opd.errors import RolloutEngineError
from student.rollout.servers import folder as folder_module
from student.rollout.servers.folder import WeightsFolder, digests_of, label_of
from student.run.space import Space

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


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the disk has no room for files of more than 1,000 bytes."""
    disk = threading.Event()

    def write(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        save_file(tensors, path, **more)
        if disk.is_set() and path.stat().st_size > 1000:
            os.truncate(path, 1000)
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(folder_module, "save_file", write)
    return disk


def test_a_run_waits_for_space_and_writes_the_weights_then(tmp_path: Path, full: threading.Event) -> None:
    lines: list[str] = []

    def freed(line: str) -> None:
        lines.append(line)
        full.clear()

    folder = WeightsFolder(tmp_path / "weights", space=Space(60.0, log=freed))
    full.set()
    _, written = folder.put(WEIGHTS, "{}", FILES)
    assert torch.equal(load_file(written / FILES[0])["w"], WEIGHTS["w"])
    assert "cannot be written to" in lines[0] and "the run waits up to 60 s" in lines[0]
    assert lines[1].startswith("there is space again") and len(lines) == 2


def test_ranks_wait_together_where_the_disk_of_one_is_full(tmp_path: Path, full: threading.Event) -> None:
    meeting, lines = Meeting(2), list[str]()

    def freed(line: str) -> None:
        lines.append(line)
        full.clear()

    def write(index: int) -> tuple[str, Path]:
        folder = WeightsFolder(tmp_path / "weights", space=Space(60.0, log=freed))
        # Only the first rank's file is larger than the disk has room for.
        tensors = WEIGHTS if index == 0 else {"v": torch.ones(2)}
        return folder.put_together([(f"{index}.safetensors", tensors)], "{}", meeting.rank(index))

    full.set()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(write, range(2))
    assert first == second and first[0] == label_of(digests_of(WEIGHTS | {"v": torch.ones(2)}))
    assert torch.equal(load_file(first[1] / "0.safetensors")["w"], WEIGHTS["w"])
    assert len(lines) == 4 and sum("the run waits up to" in line for line in lines) == 2


def test_a_disk_that_stays_full_is_the_engine_s_error(tmp_path: Path, full: threading.Event) -> None:
    folder = WeightsFolder(tmp_path / "weights")
    full.set()
    with pytest.raises(RolloutEngineError, match=r"os error 28.*rollout.engine.folder"):
        folder.put(WEIGHTS, "{}", FILES)
    assert [path.suffix for path in folder.root.iterdir()] == [".lock"]


def test_weights_that_do_not_fit_leave_nothing_and_can_be_written_later(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path / "weights")
    with files_of_at_most(1000), pytest.raises(RolloutEngineError, match=r"cannot be written to \S+/weights \("):
        folder.put(WEIGHTS, "{}", FILES)
    assert [path.suffix for path in folder.root.iterdir()] == [".lock"]
    _, written = folder.put(WEIGHTS, "{}", FILES)
    assert sorted(path.name for path in written.iterdir()) == sorted(FILES)
    folder.close()
    assert not folder.root.exists()


def test_a_server_of_another_user_may_read_the_weights(tmp_path: Path) -> None:
    _, folder = WeightsFolder(tmp_path / "weights").put(WEIGHTS, "{}", FILES)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {folder.stat().st_mode & 0o666}
