"""Run folders after a kill in an unlucky place, and on a file system that cannot be written."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from killed import kill_at_rename

from opd.config import parse_settings
from opd.config.text import read_yaml
from opd.errors import CheckpointError, RunFolderError
from student.job.session import train
from student.run.folder import RunFolder
from student.settings.recipe import Recipe


def recipe(path: Path, **changes: Any) -> Recipe:
    return parse_settings(
        Recipe, {"run": str(path), "model": {"path": "m"}, "prompts": {"task": "addition"}, **changes}
    )


CREATE = """
import json
from opd.config import parse_settings
from student.settings.recipe import Recipe
from student.run.folder import RunFolder
RunFolder.create(parse_settings(Recipe, json.loads(sys.argv[1])))
"""


def test_a_run_killed_before_its_recipe_had_its_name_can_be_started_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    kill_at_rename(".recipe.yaml", CREATE, recipe(path).model_dump_json())
    assert len(list(path.iterdir())) == 1  # a draft
    with pytest.raises(CheckpointError, match="start it without --resume"):
        RunFolder.reopen(recipe(path))
    RunFolder.check_new(path)
    RunFolder.create(recipe(path))
    assert [p.name for p in path.iterdir()] == ["recipe.yaml"]
    with pytest.raises(RunFolderError, match="exists already"):
        RunFolder.check_new(path)


def test_a_resume_on_a_read_only_file_system_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    folder = RunFolder.create(recipe(path))

    def read_only(self: Path, *arguments: Any, **keywords: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("open", "unlink"):  # there unlink fails also where the file does not exist
        monkeypatch.setattr(Path, name, read_only)
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: "another recipe")
    with pytest.raises(RunFolderError, match=r"recipe\S*\.yaml .*: Read-only file system") as caught:
        folder.keep_recipe(recipe(path), 3)
    assert caught.value.exit_code == 13


def test_a_resume_that_is_killed_before_its_first_checkpoint_leaves_the_recipe_of_the_steps_done(
    tmp_path: Path,
) -> None:
    first, second, third = (recipe(tmp_path / "run", metrics_port=port) for port in (1, 2, 3))
    folder = RunFolder.create(first)
    for again in (second, third):
        folder.keep_recipe(again, 3)
    kept = read_yaml((folder.path / "recipe-until-000003.yaml").read_text())
    assert Recipe.model_validate(kept) == first


HOLD = """
import sys
from pathlib import Path
from student.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).alone():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_not_resumed_while_another_process_writes_it_and_is_once_that_was_killed(tmp_path: Path) -> None:
    job = recipe(tmp_path / "run")
    RunFolder.create(job)
    command = [sys.executable, "-c", HOLD, str(job.run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(RunFolderError, match=f"another process .*process {other.pid} on "):
            train(job, resume=True)
        other.kill()
    with RunFolder.reopen(job).alone(), pytest.raises(RunFolderError, match=f"process {os.getpid()} on"):
        train(job, resume=True)


def test_where_files_cannot_be_locked_a_run_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(recipe(tmp_path / "run"))

    def unsupported(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with folder.alone() as held:
        assert held is folder


def test_of_several_ranks_the_first_alone_locks_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(recipe(tmp_path / "run"))
    with folder.alone():
        monkeypatch.setenv("RANK", "1")
        with folder.alone() as held:
            assert held is folder
