"""An output that cannot be written is refused before the work begins, in one sentence and with one exit code."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError
from transformers import PreTrainedModel

import opd.cli
from opd.errors import ConfigError, OutputError, RunFolderError
from opd.files import check_out, check_writable
from student.run.folder import RunFolder

RECIPE = "{run: run, model: {path: models/m}, prompts: {task: addition}, eval: {reverse_kl: false}}"
PROC = "cannot be written, because /proc cannot be written: No such file or directory; choose another.\n"
"""Nothing can be created in /proc, also by root."""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Call the command line; gives stderr, of a given exit code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 2", "answer": "3"}\n' * 4)

    def run(line: str, code: int) -> str:
        monkeypatch.setattr(sys, "argv", ["opd", *line.split()])
        with pytest.raises(SystemExit) as caught:
            opd.cli.main()
        error = capsys.readouterr().err
        assert caught.value.code == code, error
        return error

    return run


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(
    "line",
    [
        "merge /proc/out models/a models/b",
        "tiny build /proc/out --preset test",
        "tiny random /proc/out",
        "eval models/m --recipe recipe.yaml --out /proc/out.json",
        "premise recipe.yaml --out /proc/out.json",
        "compose rows.jsonl --out /proc/out.jsonl",
        "episodes record lock --out /proc/out.jsonl",
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_the_work_begins(call: Callable[..., str], line: str) -> None:
    error = call(line, OutputError.exit_code)
    assert error.startswith("error: ") and "/proc/out" in error and error.endswith(PROC), error


@pytest.mark.parametrize("line", ["merge rows.jsonl/out a b", "tiny random rows.jsonl/out"])
def test_a_file_on_the_way_to_the_folder_is_named(call: Callable[..., str], line: str) -> None:
    assert "rows.jsonl cannot be written: Not a directory" in call(line, OutputError.exit_code)


def test_a_run_folder_that_is_a_file_is_not_offered_to_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RunFolderError, match=r"^run folder \S+run is a file; .*\(run=\.\.\.\)\.$"):
        RunFolder.check_new(tmp_path / "run")


@pytest.mark.parametrize("line", ["compose rows.jsonl", "episodes record lock", "report run"])
def test_a_folder_in_place_of_the_file_is_a_wrong_command_line(call: Callable[..., str], line: str) -> None:
    assert call(f"{line} --out .", ConfigError.exit_code) == "error: --out . is a folder; name a file in it.\n"
    assert "the folder of --out no/out does not exist; create no first" in call(f"{line} --out no/out", 2)


def test_a_disk_that_fills_up_is_one_sentence_and_leaves_no_draft(
    call: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: PreTrainedModel, folder: Path) -> None:
        folder.mkdir(parents=True)
        # What safetensors raises then; it is not an OSError.
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    error = call("tiny random out --scale 0.05 --vocabulary 1024 --prompts 2", OutputError.exit_code)
    assert "folder out cannot be written: " in error and "No space left on device" in error, error
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_devices_and_files_that_are_there_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_out(Path("/dev/null"))
    file = tmp_path / "out.json"
    check_out(file)
    file.touch()
    check_out(file)
    assert list(tmp_path.iterdir()) == [file], "the check leaves nothing"
    check_writable(tmp_path / "a" / "b" / "c", "folder c")
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write every file
    with pytest.raises(OutputError, match=r"^--out \S+out\.json .*: Permission denied; "):
        check_out(file)
