"""A resumed run says when its prompt files have changed."""

import json
from pathlib import Path

import pytest

from opd.config import Settings, parse_settings
from opd.tasks import PromptSettings, build_prompts
from opd.tasks.source import Contents
from student.run.changes import changed_contents, keep_contents
from student.run.folder import RunFolder


class Prompts(Settings):
    prompts: PromptSettings


def contents(path: Path, **settings: object) -> dict[str, Contents]:
    found = parse_settings(Prompts, {"prompts": {"file": str(path), **settings}})
    return build_prompts(found.prompts, seed=0).contents()


def write(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "7"}) + "\n" for prompt in prompts))
    return path


def test_the_same_prompts_are_not_mentioned_whatever_the_layout_of_their_file(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), write(tmp_path / "p.jsonl", "a", "b", "c")
    assert keep_contents(folder, contents(path)) == []
    path.write_text(path.read_text().replace(": ", ":") + "\n\n")
    assert keep_contents(folder, contents(path)) == []


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (("a", "b", "c", "d"), "(rows: 3 then, 4 now)"),
        (("a", "b", "x"), "(rows: 3 as before, but others)"),
        (("c", "b", "a"), "(rows: 3 as before, but others)"),
    ],
)
def test_another_row_or_another_order_is_said_once(tmp_path: Path, prompts: tuple[str, ...], said: str) -> None:
    folder, path = RunFolder(tmp_path), write(tmp_path / "p.jsonl", "a", "b", "c")
    keep_contents(folder, contents(path))
    now = contents(write(path, *prompts))
    (dry,) = changed_contents(folder, now)
    (change,) = keep_contents(folder, now)
    assert dry == change
    assert change.startswith(f"the prompts of {path} have changed since this run read them {said}; the order of")
    assert keep_contents(folder, now) == []


def test_another_answer_and_another_file_are_changes_too(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), write(tmp_path / "p.jsonl", "a", "b", "c")
    keep_contents(folder, contents(path))
    path.write_text(path.read_text().replace("7", "8"))
    assert len(changed_contents(folder, contents(path))) == 1
    other = write(tmp_path / "q.jsonl", "a", "b")
    read, left = keep_contents(folder, contents(other))
    assert read.startswith(f"the prompts are read from {other} for the first time (rows: 2)")
    assert left.startswith(f"the prompts of {path} are no longer read")


def test_the_file_of_held_out_prompts_counts_too(tmp_path: Path) -> None:
    folder, path, held = RunFolder(tmp_path), write(tmp_path / "p.jsonl", "a", "b"), write(tmp_path / "h.jsonl", "c")
    keep_contents(folder, contents(path, heldout_file=str(held)))
    write(held, "c", "d")
    (change,) = keep_contents(folder, contents(path, heldout_file=str(held)))
    assert str(held) in change and "(rows: 1 then, 2 now)" in change


def test_a_damaged_record_of_prompts_stops_no_run(tmp_path: Path) -> None:
    folder, path = RunFolder(tmp_path), write(tmp_path / "p.jsonl", "a", "b")
    (tmp_path / "prompts.json").write_text('{"x": 3}')
    assert changed_contents(folder, contents(path)) == []
    assert keep_contents(folder, {"table": Contents(1, "0")}) == []
