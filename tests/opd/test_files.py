"""Small files are written whole or not at all."""

import json
import os
from pathlib import Path

import pytest

from opd.files import lock, share, write_out, write_whole


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


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without hard links"])
def test_a_new_file_is_written_once(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr("os.link", lambda source, target: (_ for _ in ()).throw(PermissionError("no links")))
    write_whole(tmp_path / "claim", "first", new=True)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "claim", "second", new=True)
    assert [path.name for path in tmp_path.iterdir()] == ["claim"]
    assert (tmp_path / "claim").read_text() == "first"


def test_the_lock_of_a_file_that_was_removed_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("a") as stale:
        path.unlink()
        assert not lock(path, stale.fileno())
        with path.open("a") as fresh, path.open("a") as third:
            assert lock(path, fresh.fileno()) and not lock(path, third.fileno())
            assert not lock(path, stale.fileno())


def test_text_of_others_that_is_no_unicode_is_written_as_json_escapes_it(tmp_path: Path) -> None:
    write_out(tmp_path / "out.json", '"caf\u00e9 \ud800"')
    assert json.loads((tmp_path / "out.json").read_bytes()) == "caf\u00e9 \ud800"


def test_output_to_a_link_goes_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_out(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"
