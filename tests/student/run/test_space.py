"""What finds a disk full is done again until there is space, the run is to stop, or it has waited long enough."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file
from thread_ranks import Meeting
from torch import ones

from opd.errors import DiskFullError, OutputError, RunFolderError
from student.run.folder import RunFolder
from student.run.space import Space, drafted, is_full, tight


class Disk:
    """Is full for the first `times` writes."""

    def __init__(self, times: int) -> None:
        self.times, self.tried = times, 0

    def write(self) -> str:
        self.tried += 1
        if self.tried <= self.times:
            raise DiskFullError("x cannot be written: no space left; free some and continue with --resume.")
        return "written"


def test_work_is_done_again_until_there_is_space() -> None:
    lines: list[str] = []
    disk = Disk(1)
    assert Space(60.0, log=lines.append).until_written(disk.write) == "written" and disk.tried == 2
    assert lines[0].startswith("warning: x cannot be written: no space left; the run waits up to 60 s")
    assert lines[1].startswith("there is space again after ") and len(lines) == 2


def test_nothing_is_waited_for_without_patience_or_when_the_run_is_to_stop() -> None:
    for space in (Space(), Space(60.0, stopping=lambda: True)):
        disk = Disk(9)
        with pytest.raises(DiskFullError, match=r"free some .* --resume"):
            space.until_written(disk.write)
        assert disk.tried == 1


def test_a_signal_ends_the_wait() -> None:
    stop = threading.Event()
    with pytest.raises(DiskFullError):
        Space(1e6, stopping=stop.is_set, log=lambda line: stop.set()).until_written(Disk(9).write)


def test_other_errors_are_not_waited_for() -> None:
    def forbidden() -> None:
        raise RunFolderError("x cannot be written: permission denied.")

    with pytest.raises(RunFolderError, match="permission"):
        Space(1e6, log=pytest.fail).until_written(forbidden)


def test_ranks_wait_and_give_up_together() -> None:
    meeting, stop = Meeting(2), threading.Event()

    def rank(index: int) -> int:
        disk = Disk(9)
        # Only the second one hears the signal.
        stopping = stop.is_set if index else (lambda: False)
        with pytest.raises(DiskFullError):
            Space(1e6, stopping, log=lambda line: stop.set()).until_written(disk.write, meeting.rank(index).any)
        return disk.tried

    with ThreadPoolExecutor(2) as pool:
        tried = list(pool.map(rank, range(2)))
    assert tried[0] == tried[1]


def test_a_full_disk_is_told_from_other_errors_also_by_safetensors(tmp_path: Path) -> None:
    assert is_full(OSError(errno.ENOSPC, "x")) and is_full(OSError(errno.EDQUOT, "x"))
    assert not is_full(OSError(errno.EACCES, "x")) and not is_full(ValueError("full"))
    with pytest.raises(SafetensorError) as missing:
        save_file({"x": ones(2)}, tmp_path / "no" / "such")
    assert not is_full(missing.value)
    assert is_full(SafetensorError("I/O error: No space left on device (os error 28)"))


def test_a_full_disk_is_told_from_other_errors_also_by_a_copied_folder() -> None:
    """`shutil.copytree` raises one error that quotes those of its files."""
    for number, full in ((errno.ENOSPC, True), (errno.EACCES, False)):
        assert is_full(shutil.Error([("a", "b", str(OSError(number, os.strerror(number))))])) is full


def test_a_line_that_a_full_disk_cut_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"step": 1})
    plain = Path.open

    @contextmanager
    def filling(path: Path, *arguments: Any, **keywords: Any) -> Iterator[TextIO]:
        with plain(path, *arguments, **keywords) as file:
            file.write('{"st')  # as far as it went
            file.flush()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            yield file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", filling)
        with pytest.raises(DiskFullError, match=r"metrics\.jsonl .*: No space left"):
            folder.append_metrics({"step": 2})
    folder.append_metrics({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n' and folder.last_step() == 2


def test_half_of_a_surrogate_pair_is_written_as_json_writes_it(tmp_path: Path) -> None:
    """A verifier may give any text as its reason, which must not end the run."""
    folder = RunFolder(tmp_path)
    folder.append_samples([{"step": 1, "reason": "é\ud83d"}])
    assert json.loads(folder.samples.read_text(encoding="utf-8")) == {"step": 1, "reason": "é\ud83d"}


def test_a_draft_has_one_writer_and_a_taken_name_is_said(tmp_path: Path) -> None:
    draft, done = tmp_path / ".done.part", tmp_path / "done"
    (draft / "left").mkdir(parents=True)  # by a process that was killed
    with drafted(draft, "model x"):
        assert not list(draft.iterdir())
        (draft / "weights").write_text("1")
        with pytest.raises(OutputError, match=r"another process .*model x"), drafted(draft, "model x"):
            pass
        draft.rename(done)
    with pytest.raises(OutputError, match="written by another process"), drafted(draft, "model x"):
        draft.rename(done)
    assert [path.name for path in tmp_path.iterdir()] == ["done"] and (done / "weights").read_text() == "1"


def test_checkpoints_that_do_not_fit_the_disk_are_told_of_before_the_first(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert tight(tmp_path / "none" / "run", 1e3, 2) == ""
    said = tight(tmp_path / "none" / "run", free, 2)
    assert said.startswith("3 checkpoints of") and str(tmp_path) in said and "train.keep_checkpoints" in said
