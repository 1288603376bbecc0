"""Transcripts of episodes and recorded paths: what was said, by whom, and what solves a problem again."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from rows import make_row
from typer.testing import CliRunner

from opd.config import parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks.build import build_prompts
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.environments.service import make_environment
from opd.tasks.settings import FileSettings
from opd.wire.types import PayloadKind, Scores
from opd_lab.tiny.tokenizer import make_tokenizer
from student.commands.episodes_cli import app, gold
from student.data.row import EpisodeTrace, Row
from student.report.samples import entries, sample_of

PROMPT = Lock(LockOptions(digits=2, turns=4)).draw(Random(0))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def episode(tokenizer: Any, ended: str = "success", kl: float = 0.5) -> Row:
    """Two turns of a digit and an end, with the register between them; each sampled token is `kl` nats off."""
    first, second = PROMPT.extra["path"]
    ids = [*tokenizer(first)["input_ids"], 2, *tokenizer(first)["input_ids"], *tokenizer(second)["input_ids"], 2]
    own = np.array([True, True, False, True, True])
    row = make_row(
        ids,
        prompt=PROMPT,
        prompt_ids=np.array(tokenizer(PROMPT.text)["input_ids"], np.uint32),
        behaviour=np.where(own, -1.0, np.nan),
        loss_mask=own,
        text=f"{first}\n{second}",
        episode=EpisodeTrace(~own),
        turns=((0, 2), (3, 5)),
        tags={"ended": ended},
    )
    row.signals["teacher", PayloadKind.SAMPLED] = Scores(sampled=np.full(5, -1.0 - kl, np.float32))
    return row


@pytest.fixture
def run(tokenizer: Any, tmp_path: Path) -> Path:
    rows = [episode(tokenizer, "failure", 2.0), episode(tokenizer)]
    lines = entries([sample_of(row, tokenizer) for row in rows], step=3, label="train")
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_sample_of_an_episode_tells_who_said_what_and_how_far_each_turn_was(tokenizer: Any) -> None:
    sample = sample_of(episode(tokenizer), tokenizer)
    segments = sample["episode"]["segments"]
    assert [segment["who"] for segment in segments] == ["student", "environment", "student"]
    assert [segment["kl"] for segment in segments] == [1.0, None, 1.0]  # two tokens of half a nat
    assert sample["answers"] == PROMPT.extra["path"]
    assert sample["episode"]["opening"] == PROMPT.text


def test_show_prints_the_turns_and_chooses_by_their_end(run: Path) -> None:
    shown = CliRunner().invoke(app, ["show", str(run)], catch_exceptions=False).output
    assert "failure" in shown and "success" in shown and shown.count("[turn 2, 2 tokens, 1.000 nats]") == 1
    only = CliRunner().invoke(app, ["show", str(run), "--ended", "success"], catch_exceptions=False).output
    assert "failure" not in only and "4.000 nats" not in only
    lines = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    marked = [json.dumps(json.loads(line) | {"answer": "a\u2028b"}, ensure_ascii=False) for line in lines]
    (run / "samples.jsonl").write_text("\n".join(marked) + "\n", encoding="utf-8")
    assert CliRunner().invoke(app, ["show", str(run)], catch_exceptions=False).output == shown
    with pytest.raises(DataError, match="no episode that matches"):
        CliRunner().invoke(app, ["show", str(run), "--ended", "broken"], catch_exceptions=False)
    with pytest.raises(DataError, match=r"samples\.jsonl of .* read"):
        CliRunner().invoke(app, ["show", str(run / "absent")], catch_exceptions=False)


def replayed(out: Path, count: int) -> list[bool | None]:
    """Whether the paths of a file solve its problems, when it is read as prompts."""
    source = build_prompts(parse_settings(FileSettings, {"file": str(out), "heldout": 0.0}), seed=0)
    found = []
    for prompt in source.prompts("train", count):
        world = make_environment(dict(prompt.extra["environment"]))
        seen = world.reset(prompt, 0)
        for action in prompt.extra["path"]:
            seen = world.step(action)
        found.append(seen.success)
    return found


@pytest.mark.parametrize("task", [["rooms", "depth=3"], ["lock", "digits=3"]])
def test_recorded_paths_of_a_task_are_prompts_that_can_be_replayed(task: list[str], tmp_path: Path) -> None:
    out = tmp_path / "paths.jsonl"
    arguments = ["record", *task, "--count", "5", "--out", str(out)]
    assert "wrote 5 paths" in CliRunner().invoke(app, arguments, catch_exceptions=False).output
    assert replayed(out, 5) == [True] * 5


def test_the_successes_of_a_run_are_paths_too(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    CliRunner().invoke(app, ["record", str(run), "--out", str(out)], catch_exceptions=False)
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["path"] == PROMPT.extra["path"] and line["environment"]["name"] == "lock"
    assert replayed(out, 1) == [True]


def test_a_task_without_paths_is_refused() -> None:
    with pytest.raises(ConfigError, match="solution path"):
        list(gold("addition", [], 1, 0))
