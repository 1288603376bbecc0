"""Run folders after a kill in an unlucky place, and on a file system that cannot be written."""

import errno
from pathlib import Path
from typing import Any

import pytest
from killed import kill_at_rename

from opd.config import parse_settings
from opd.errors import CheckpointError, RunFolderError
from student.recipe import Recipe
from student.run.folder import RunFolder


def recipe(path: Path, **changes: Any) -> Recipe:
    return parse_settings(
        Recipe, {"run": str(path), "model": {"path": "m"}, "prompts": {"task": "addition"}, **changes}
    )


CREATE = """
import json
from opd.config import parse_settings
from student.recipe import Recipe
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
    with pytest.raises(RunFolderError, match=r"recipe\S*\.yaml cannot be written: Read-only file system") as caught:
        folder.keep_recipe(recipe(path), 3)
    assert caught.value.exit_code == 13
