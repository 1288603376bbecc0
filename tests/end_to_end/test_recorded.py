"""Training from a recorded store without any server, equal to the run with a live one."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from run_records import metrics_of
from slow_cases import slow

from opd.errors import DataError
from student.data.plan import plan_step
from student.job.job import build_job
from student.job.session import train
from student.settings.recipe import Recipe

Hashes = Callable[[Path], dict[str, str]]


def model_of(summary: dict[str, Any], hashes: Hashes) -> dict[str, str]:
    found = hashes(Path(summary["checkpoint"]) / "model")
    assert found
    return found


@pytest.mark.parametrize("entry", [{"payload": "topk", "k": 8}, *slow({"payload": "hidden"})])
def test_a_run_from_a_recorded_store_without_any_server_has_the_online_runs_weights(
    world: Path, serve: Any, make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Hashes, entry: dict[str, Any]
) -> None:
    server = serve("--model", f"teacher={world / 'teacher'}", "--deterministic")
    store = tmp_path / "store"
    common: dict[str, Any] = {
        "objective": [{"name": "opd", **entry}],
        "train": {"steps": 3, "checkpoint_every": 0},
        "eval": {"prompts": 0},
    }
    online = train(
        make_recipe(
            run=str(tmp_path / "online"),
            teachers={"endpoints": [server.address], "fleet": {"cache": {"folder": str(store)}}},
            **common,
        )
    )
    server.process.kill()
    server.process.wait()
    offline = train(make_recipe(run=str(tmp_path / "offline"), teachers={"endpoints": [f"store:{store}"]}, **common))
    assert model_of(offline, hashes) == model_of(online, hashes)
    lines = metrics_of(tmp_path / "offline")
    assert len(lines) == 3 and all(line["reverse_kl"] > 0 for line in lines)
    (store / "scores.sqlite").unlink()
    recipe = make_recipe(run=str(tmp_path / "gap"), teachers={"endpoints": [f"store:{store}"]}, **common)
    with pytest.raises(DataError) as caught:
        train(recipe)
    message = str(caught.value)
    # The row by step and prompt, the store, and what to do.
    assert str(store) in message and entry["payload"] in message and "of group '" in message
    assert "record" in message and "start it again" in message and "\n" not in message


def test_rows_scored_by_opd_score_train_like_the_live_teacher(
    teacher: Any, make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Hashes
) -> None:
    """The first step's rollouts depend on the first weights alone, so they can be scored before the run."""
    common: dict[str, Any] = {"train": {"steps": 1}, "eval": {"prompts": 0}}
    recipe = make_recipe(run=str(tmp_path / "online"), **common)
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        plan = plan_step(0, job.source.prompts("train", 8), samples=1, max_new_tokens=8, temperature=1.0)
        rows = job.sampler.sample(plan.rows)
    lines = [
        {
            "prompt_ids": np.asarray(row.prompt_ids).tolist(),
            "response_ids": row.response_ids.tolist(),
            "gather_ids": None if row.candidates is None else row.candidates.tolist(),
        }
        for row in rows
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    store = tmp_path / "store"
    arguments = ["score", teacher.address, "--rows", str(tmp_path / "rows.jsonl"), "--out", str(store)]
    arguments += ["--teacher", "teacher", "--payload", "gather", "--k", "8"]
    result = forked.run([sys.executable, "-m", "opd.cli", *arguments])
    assert result.returncode == 0, result.stderr
    offline = train(make_recipe(run=str(tmp_path / "offline"), teachers={"endpoints": [f"store:{store}"]}, **common))
    assert model_of(offline, hashes) == model_of(train(recipe), hashes)
