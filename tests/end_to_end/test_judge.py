"""A run whose verifier is a language model in a process of its own, which dies on the way and comes back."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
from ports import held_port
from run_records import metrics_of
from waiting import wait_until

from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from student.job.session import train
from student.settings.recipe import Recipe

_PROGRAM = Path(__file__).parents[1] / "support" / "judge_model.py"


@pytest.fixture
def judge(world: Path) -> Iterator[Callable[..., str]]:
    """Start the judge, and give the address at which it always is."""
    port, running = held_port(), list[forked.Program]()
    address = f"http://127.0.0.1:{port}/v1"

    def start(answers: int = 0) -> str:
        for process in running:
            process.wait(60)
        command = [sys.executable, str(_PROGRAM), str(world / "teacher"), str(port), str(answers + bool(answers))]
        running.append(forked.Program(command))
        client = ChatClient(ChatSettings(endpoint=address, model="judge", max_tokens=1))

        def up() -> bool:
            try:
                return client.ask([{"role": "user", "content": "1+1="}]) is not None
            except ChatFailed:
                assert running[-1].poll() is None
                return False

        wait_until(up)
        return address

    yield start
    for process in running:
        process.kill()
        process.wait(60)


def test_a_judge_that_dies_leaves_rows_unknown_and_the_run_goes_on(
    make_recipe: Callable[..., Recipe],
    judge: Callable[..., str],
    tmp_path: Path,
    hashes: Any,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def recipe(address: str, steps: int) -> Recipe:
        options = {"endpoint": address, "model": "judge", "question": "{answer}+1=", "max_tokens": 4, "attempts": 1}
        table = tmp_path / "prompts.jsonl"
        table.write_text("".join(json.dumps({"prompt": f"{i + 10}+{i}=", "answer": "7"}) + "\n" for i in range(40)))
        return make_recipe(
            teachers={},
            prompts={
                "file": str(table),
                "verifier": "chat_judge",
                "verifier_options": {**options, "cache": str(tmp_path / "answers")},
                "heldout": 0,
            },
            rollout={"prompts_per_step": 3, "samples_per_prompt": 4},
            objective=[{"name": "rloo", "advantage": {"name": "reinforce"}}],
            eval={"prompts": 0},
            train={"steps": steps},
        )

    summary = train(recipe(judge(32), 5))
    assert "did not answer" in capsys.readouterr().err + caplog.text
    lines = metrics_of(tmp_path / "run")
    # It dies in the middle of a step: what it had graded is learnt from, the rest counts as unknown and not as wrong.
    assert [line["unknown_share"] < 1 for line in lines] == [True, True, True, False, False]
    assert lines[2]["unknown_share"] > lines[1]["unknown_share"]
    assert [line["updates"] for line in lines] == [1, 1, 1, 0, 0]
    assert all("reward" not in line and line["updates_skipped"] == 1 for line in lines[3:])
    assert all(line["grad_norm"] > 0 and 0 < line["reward"] < 1 for line in lines[:2])
    # The run is over, and goes on where it stood once there is a judge again.
    *_, third, _, last = sorted((tmp_path / "run" / "checkpoints").iterdir())
    dead = hashes(last / "model")
    assert dead == hashes(third / "model") != {} and Path(summary["checkpoint"]) == last
    again = train(recipe(judge(), 6), resume=True)
    line = metrics_of(tmp_path / "run")[-1]
    assert line["step"] == 6 and line["unknown_share"] < 1 and line["grad_norm"] > 0
    assert hashes(Path(again["checkpoint"]) / "model") != dead
