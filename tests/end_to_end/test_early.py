"""Learning while teachers still score: a micro-batch waits for its own rows alone; the weights are those of waiting."""

import json
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from run_records import records

import student.preparation
from opd.errors import CancelledError, OutageError
from opd.fleet.source import ScoreSource
from opd.wire.types import Scores
from student.data.row import Row
from student.learning.learner import Learner
from student.loop import train
from student.recipe import Recipe
from student.rollout.stages import StepStages
from student.scoring.arriving import Arriving

SMALL = {"train": {"steps": 2, "micro_batch_tokens": 40, "checkpoint_every": 0}, "eval": {"prompts": 0}}
"""Steps of several micro-batches."""
PASS, UPDATE, CONNECT = Learner._micro_loss, Learner.update, student.preparation.connect


class Reluctant:
    """A fleet that answers for the shortest rows, and for all others once the learner has learnt from something."""

    def __init__(self, fleet: ScoreSource, learnt: Event) -> None:
        self._fleet, self._learnt = fleet, learnt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def submit_many(self, model: str, items: Any, spec: Any, **keywords: Any) -> list[Future[Scores]]:
        """As that of the fleet; a shortest row is the first that a learner needs."""
        answers = self._fleet.submit_many(model, items, spec, **keywords)
        lengths = [len(item.token_ids) for item in items]
        return [a if n == min(lengths) else self._late(a) for a, n in zip(answers, lengths, strict=True)]

    def _late(self, answer: Future[Scores]) -> Future[Scores]:
        late: Future[Scores] = Future()

        def tell() -> None:
            assert self._learnt.wait(60), "the learner waits for rows that it does not need yet"
            late.set_result(answer.result(60))

        Thread(target=tell, daemon=True).start()
        return late


@pytest.fixture
def reluctant(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Makes fleets reluctant; set while the learner has learnt from something of the step."""
    learnt = Event()

    def make(recipe: Recipe) -> Any:
        fleet = CONNECT(recipe)
        return None if fleet is None else Reluctant(fleet, learnt)

    def one(self: Learner, *arguments: Any) -> Any:
        found = PASS(self, *arguments)
        learnt.set()
        return found

    def update(self: Learner, *arguments: Any) -> Any:
        learnt.clear()
        return UPDATE(self, *arguments)

    monkeypatch.setattr(student.preparation, "connect", make)
    monkeypatch.setattr(Learner, "_micro_loss", one)
    monkeypatch.setattr(Learner, "update", update)
    return learnt


def wait_for_all(self: StepStages, rows: Sequence[Row], *, judged: bool) -> None:
    """Instead of `StepStages.score`."""
    self._job.scorer.collect(rows, self._rewards, judged=judged)


def one_row_first(**changes: Any) -> dict[str, Any]:
    """A recipe whose first micro-batch is the shortest row alone."""
    return {**SMALL, **changes, "train": {**SMALL["train"], "micro_batch_tokens": 1, **changes.get("train", {})}}


@pytest.mark.usefixtures("reluctant")
def test_learning_begins_with_the_first_rows_that_are_scored(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early = make_recipe(run=str(tmp_path / "early"), **one_row_first())
    found = train(early)
    lines = [json.loads(line) for line in (early.run / "metrics.jsonl").read_text().splitlines()]
    late = [line["scored_while_learning"] for line in lines]
    assert all(0 < share <= 1 for share in late), late
    with monkeypatch.context() as patch:
        patch.setattr(StepStages, "score", wait_for_all)
        patch.setattr(student.preparation, "connect", CONNECT)
        waiting = make_recipe(run=str(tmp_path / "waiting"), **one_row_first())
        waited = train(waiting)
    assert hashes(Path(found["checkpoint"])) == hashes(Path(waited["checkpoint"]))
    assert records(early) == records(waiting)
    assert all("scored_while_learning" not in line for line in records(waiting))


@pytest.mark.parametrize("how", ["signal", "outage"])
def test_a_step_that_is_given_up_between_two_micro_batches_is_taken_again(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]], how: str
) -> None:
    calm_recipe = make_recipe(run=str(tmp_path / "calm"), **one_row_first())
    calm = train(calm_recipe)
    recipe = make_recipe(run=str(tmp_path / "cut"), **one_row_first())
    arrive, calls = StepStages.arrive, []
    error = CancelledError if how == "signal" else OutageError

    def stopped(self: StepStages, rows: Sequence[Row]) -> None:
        calls.append(len(rows))
        # Of the second step, after the gradients of three rows; each step waits for eight, and at its end for all.
        if len(calls) == 9 + 4:
            if how == "outage":
                raise OutageError("teacher 't' stayed away.")
            signal.raise_signal(signal.SIGINT)
            self._poll()
        arrive(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepStages, "arrive", stopped)
        patch.setattr(Arriving, "late", property(lambda self: 1))  # however quick the teacher is
        with pytest.raises(error, match="1 of 2 steps, saved in"):
            train(recipe)
    assert calls[:9] == [1] * 8 + [8] and len(calls) == 13
    resumed = train(recipe, resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(calm["checkpoint"]))
    assert records(recipe) == records(calm_recipe)


@pytest.mark.slow
def test_two_ranks_whole_or_sharded_wait_for_each_micro_batch_together(
    make_recipe: Callable[..., Recipe], tmp_path: Path, two_ranks: Callable[..., None]
) -> None:
    rollout = {"prompts_per_step": 5}  # three rows on one rank, two on the other
    one, two = (make_recipe(run=str(tmp_path / name), **one_row_first(rollout=rollout)) for name in ("one", "two"))
    sharded = make_recipe(run=str(tmp_path / "sharded"), **one_row_first(rollout=rollout, train={"sharding": "fsdp"}))
    train(one)
    two_ranks(two, sharded)
    for many in (two, sharded):
        for mine, theirs in zip(records(one), records(many), strict=True):
            for name in ("loss/opd", "reverse_kl", "grad_norm", "response_tokens"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name
