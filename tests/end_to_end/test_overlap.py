"""Rollouts beside learning: each step by the weights of k steps before, and the same again whatever stops the run."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from run_records import metrics_of, records
from slow_cases import slow
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.errors import CancelledError, DataError, OutageError
from student.data.row import Row
from student.job.session import train
from student.plugin.controllers import Controller
from student.plugin.traits import Traits
from student.rollout.ahead import Ahead
from student.rollout.engine import CopyEngine
from student.rollout.requests import RolloutSpec
from student.rollout.transformers import rollout
from student.scoring.score import Scoring
from student.settings.recipe import Recipe

ADWIN = {"name": "adwin", "windows": [2, 4], "rows": 8, "folds": 2, "delay": 1, "null_every": 0, "rho": 0.3}
EFFOPD = {
    "name": "effopd",
    "tries": 2,
    "gate": {"kind": "reverse_kl", "prompts": 8, "gain": 0.0, "length_tolerance": 9, "truncation_tolerance": 1},
}


@pytest.fixture
def overlapped(make_recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    """Recipes of five steps, two of which are sampled ahead, by an objective that allows for it."""

    def make(staleness: int = 2, **changes: Any) -> Recipe:
        own = {
            "objective": [{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}],
            "eval": {"prompts": 0},
            **changes,
        }
        return make_recipe(**{**own, "train": {"steps": 5, "max_staleness": staleness, **changes.get("train", {})}})

    return make


class Witness(Controller):
    """Keeps the rows that were learnt from."""

    traits = Traits(works_ahead=True)
    seen: ClassVar[list[Row]] = []

    def compose(self, rows: list[Row]) -> list[Row]:
        Witness.seen.extend(rows)
        return rows


def sampled_by(folder: Path, rows: Sequence[Row]) -> list[list[int]]:
    """What the weights in `folder` answer in the random streams of `rows`."""
    from student.data.plan import PlannedRow

    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = RolloutSpec(seed=0, batch_rows=64, candidates=8, valid_vocab=len(tokenizer), max_prompt_tokens=32)
    planned = [PlannedRow(row.key, row.prompt, max_new_tokens=8, temperature=1.0) for row in rows]
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [row.response_ids.tolist() for row in rollout(model, tokenizer, planned, spec)]


@pytest.mark.parametrize("staleness", [2, *slow(1)])
def test_step_n_is_sampled_by_the_weights_of_step_n_minus_k_and_no_others(
    overlapped: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, world: Path, staleness: int
) -> None:
    monkeypatch.setitem(sys.modules, "witness", SimpleNamespace(Witness=Witness))
    monkeypatch.setattr(Witness, "seen", [])
    torch.set_num_threads(1)
    recipe = overlapped(
        staleness,
        methods=[{"name": "witness:Witness"}],
        train={"learning_rate": 1e-2},
        rollout={"engine": {"name": "transformers", "mismatch_rows": 4, "mismatch_limit": 1e-3}},
    )
    train(recipe)
    assert all(line["mismatch/log_ratio"] < 1e-4 for line in records(recipe))  # of the weights that sampled
    assert [line["staleness"] for line in records(recipe)] == [min(step, staleness) for step in range(5)]
    for step in range(5):
        rows = [row for row in Witness.seen if row.key.step == step]
        version = max(0, step - staleness)
        assert len(rows) == 8 and {int(v) for row in rows for v in row.policy_version} == {version}
        found = [row.response_ids.tolist() for row in rows]
        assert found == sampled_by(weights(recipe, version, world), rows)
        if step > version:
            assert found != sampled_by(weights(recipe, step, world), rows)


def weights(recipe: Recipe, version: int, world: Path) -> Path:
    return recipe.run / "checkpoints" / f"step-{version:06d}" / "model" if version else world / "student"


def test_the_run_shows_its_lag_its_weights_and_who_waited(overlapped: Callable[..., Recipe]) -> None:
    recipe = overlapped(1)
    train(recipe)
    for line in metrics_of(recipe.run):
        assert line["seconds"]["wait_rollout"] >= 0 and "rollout" not in line["seconds"]
        assert line["rollout_seconds"] > 0 and line["sampler_idle_seconds"] >= 0
        assert 0 <= line["importance_truncated"] < 1
        assert (line["importance_weight"] == pytest.approx(1.0, abs=1e-5)) == (line["staleness"] == 0)
    events = json.loads((recipe.run / "timeline.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[e["tid"]], e["name"], e["args"]["step"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    for track, name in (("sampler", "rollout"), ("learner", "learn"), ("teachers", "scoring")):
        assert sorted({step for at, what, step, _, _ in spans if (at, what) == (track, name)}) == [0, 1, 2, 3, 4]
    starts = {(track, step): ts for track, name, step, ts, _ in spans if name in ("rollout", "learn")}
    assert all(starts["sampler", step] < starts["learner", step] for step in range(5))


def stop_by_signal(patch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C while the learner waits for its rows."""
    original, calls = Ahead.take, []

    def take(self: Ahead, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
            arguments[-1]()
        return original(self, *arguments)

    patch.setattr(Ahead, "take", take)


def stop_by_outage(patch: pytest.MonkeyPatch, call: int) -> None:
    """A teacher goes away while rows that were sampled ahead are scored."""
    original, calls = Scoring.wait, []

    def wait(self: Scoring, *arguments: Any, **keywords: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise OutageError("teacher 't' stayed away.")
        original(self, *arguments, **keywords)

    patch.setattr(Scoring, "wait", wait)


def stop_in_thread(patch: pytest.MonkeyPatch, call: int) -> None:
    """The thread that samples ahead fails."""
    original, calls = CopyEngine.sample, []

    def sample(self: CopyEngine, *arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise DataError("a prompt is too long.")
        return original(self, *arguments, **keywords)

    patch.setattr(CopyEngine, "sample", sample)


@pytest.mark.parametrize(
    ("stop", "error", "call", "methods"),
    [
        (stop_by_signal, CancelledError, 4, []),
        (stop_in_thread, DataError, 5, []),
        *slow((stop_by_outage, OutageError, 3, [ADWIN, EFFOPD])),
    ],
)
def test_a_run_that_is_stopped_goes_on_to_the_weights_of_a_calm_one(
    overlapped: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    stop: Callable[[pytest.MonkeyPatch, int], None],
    error: type[Exception],
    call: int,
    methods: list[dict[str, Any]],
) -> None:
    objective = [{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0, "aggregation": "constant"}]
    changes = {"objective": objective, "methods": methods, "train": {"checkpoint_every": 0}}
    calm_recipe = overlapped(run=str(tmp_path / "calm"), **changes)
    calm = train(calm_recipe)
    recipe = overlapped(run=str(tmp_path / "cut"), **changes)
    with pytest.MonkeyPatch.context() as patch:
        stop(patch, call)
        with pytest.raises(error, match="of 5 steps, saved in"):
            train(recipe)
    resumed = train(recipe, resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(calm["checkpoint"]))
    assert records(recipe) == records(calm_recipe)


HALVES: dict[str, Any] = {
    "prompts": {"task": "student_plugins:Halves", "options": {"digits": 2}},
    "objective": [{"name": "grpo"}],
}
ROUNDS: dict[str, Any] = {"prompts_per_step": 3, "samples_per_prompt": 4}
KINDS: dict[str, dict[str, Any]] = {
    "gather": {},
    "adapters": {"model": {"lora": {"rank": 4}}},
    "self-teacher-and-rewards": {
        "teachers": {"default": "ema", "ema": {"decay": 0.5}},
        "contexts": {"teacher": {"prompt": "Carry! {{ prompt }}"}},
        "objective": [{"name": "opd", "payload": "hidden"}, {"name": "grpo"}],
        "rollout": {"samples_per_prompt": 2},
        "train": {"minibatches": 2},
    },
    "further-rounds": {**HALVES, "rollout": ROUNDS | {"strategy": {"name": "dynamic_sampling", "draw": "missing"}}},
    "further-answers": {
        **HALVES,
        "rollout": ROUNDS | {"strategy": {"name": "reinforce_ada", "rounds": 2}},
        "objective": [{"name": "opd", "k": 8, "importance_cap": 2.0}, {"name": "ppo"}],
        "methods": [{"name": "critic", "warm_up": 1}],
    },
    "episodes": {
        "prompts": {"task": "lock", "options": {"digits": 3, "turns": 5}},
        "rollout": {
            "prompts_per_step": 4,
            "max_new_tokens": 40,
            "episodes": {"turns": 3, "turn_tokens": 3, "isolation": "none"},
        },
        "methods": [{"name": "tcod", "order": "f2b", "every": 1, "turns": 3}],
        "eval": {"prompts": 4, "every": 1},
    },
}


@pytest.mark.parametrize(
    "kind", ["episodes", *slow("gather", "adapters", "self-teacher-and-rewards", "further-rounds", "further-answers")]
)
def test_a_run_that_is_killed_goes_on_from_its_checkpoints_to_the_same_weights(
    overlapped: Callable[..., Recipe], hashes: Callable[[Path], dict[str, str]], kind: str
) -> None:
    if kind == "adapters":
        pytest.importorskip("peft", reason="the extra lora is not installed")
    recipe = overlapped(**KINDS[kind])
    train(recipe)
    folder = recipe.run / "checkpoints"
    calm, lines = hashes(folder / "step-000005"), records(recipe)
    if kind.startswith("further"):  # with the weights of now, beside those that were sampled ahead
        assert any(line["rollout_rounds"] > 1 and 0 < line["staleness"] < 2 for line in lines[2:])
    if kind == "further-answers":
        assert [line["critic_warm_up"] for line in lines] == [1, 0, 0, 0, 0]
    assert "trainer/ahead.safetensors" in hashes(folder / "step-000002")
    for left in (4, 1) if kind == "gather" else (2,):  # a kill leaves what was written, of which the newest is taken
        for step in range(left + 1, 6):
            shutil.rmtree(folder / f"step-{step:06d}")
        train(recipe, resume=True)
        assert hashes(folder / "step-000005") == calm and records(recipe) == lines


def test_a_checkpoint_of_a_run_that_was_to_have_another_lag_is_refused(overlapped: Callable[..., Recipe]) -> None:
    from opd.errors import CheckpointError

    train(overlapped(1, train={"steps": 1}))
    with pytest.raises(CheckpointError, match=r"train.max_staleness was 1 .* 2"):
        train(overlapped(2), resume=True)


@pytest.mark.slow
def test_two_ranks_whole_or_sharded_sample_ahead_like_one_and_resume_alike(
    overlapped: Callable[..., Recipe],
    tmp_path: Path,
    two_ranks: Callable[..., None],
    hashes: Callable[[Path], dict[str, str]],
) -> None:
    changes = {"rollout": {"prompts_per_step": 3, "samples_per_prompt": 2}, "train": {"micro_batch_tokens": 64}}
    one, two = (overlapped(run=str(tmp_path / name), **changes) for name in ("one", "two"))
    changes["train"]["sharding"] = "fsdp"
    sharded = overlapped(run=str(tmp_path / "sharded"), **changes)
    train(one)
    two_ranks(two, sharded)
    for many in (two, sharded):
        for mine, theirs in zip(records(one), records(many), strict=True):
            assert theirs["staleness"] == mine["staleness"]
            for name in ("loss/opd", "reverse_kl", "importance_weight", "grad_norm", "response_tokens"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
    calm = [hashes(many.run / "checkpoints" / "step-000005" / "model") for many in (two, sharded)]
    for many in (two, sharded):
        for step in (3, 4, 5):
            shutil.rmtree(many.run / "checkpoints" / f"step-{step:06d}")
    two_ranks(two, sharded)  # runs that exist are resumed
    assert [hashes(many.run / "checkpoints" / "step-000005" / "model") for many in (two, sharded)] == calm
    assert np.isfinite(records(two)[-1]["reverse_kl"])
