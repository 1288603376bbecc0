"""Small files are written whole or not at all."""

import os
from pathlib import Path

import pytest

from opd.files import share, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for text in ("one", "tw\u00f6"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_write_that_fails_leaves_the_earlier_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    write_whole(path, "one")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "two")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["state.json"]


def test_files_are_for_whom_their_folder_is_for(tmp_path: Path) -> None:
    files = [tmp_path / "open" / "weights", tmp_path / "closed" / "weights"]
    for file, mode in zip(files, (0o750, 0o700), strict=True):
        file.parent.mkdir()
        file.parent.chmod(mode)
        file.touch(0o600)
        (file.parent / "inner").mkdir(0o700)
        share(file.parent.iterdir())
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640, 0o600]
    assert all((file.parent / "inner").stat().st_mode & 0o777 == 0o700 for file in files)
