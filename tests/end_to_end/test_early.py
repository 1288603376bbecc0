"""Learning while teachers still score: a micro-batch waits for its own rows alone; the weights are those of waiting."""

import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from run_records import metrics_of, records

import student.job.loop
import student.job.preparation
from opd.errors import CancelledError, DataError, OutageError
from opd.fleet.source import ScoreSource
from opd.wire.types import Scores
from student.data.row import Row
from student.job.session import train
from student.learning.learner import Learner
from student.plugin.controllers import Controller
from student.plugin.early import reads_no_scores
from student.plugin.strategy import Single
from student.rollout.sampling import Sampling
from student.scoring.score import Scoring
from student.settings.recipe import Recipe

SMALL = {"train": {"steps": 2, "micro_batch_tokens": 40, "checkpoint_every": 0}, "eval": {"prompts": 0}}
"""Steps of several micro-batches."""
PASS, UPDATE, CONNECT = Learner._pass, Learner.update, student.job.preparation.connect


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

    def make(recipe: Recipe, poll: Callable[[], None]) -> Any:
        fleet = CONNECT(recipe, poll)
        return None if fleet is None else Reluctant(fleet, learnt)

    def one(self: Learner, *arguments: Any) -> Any:
        found = PASS(self, *arguments)
        learnt.set()
        return found

    def update(self: Learner, *arguments: Any) -> Any:
        learnt.clear()
        return UPDATE(self, *arguments)

    monkeypatch.setattr(student.job.preparation, "connect", make)
    monkeypatch.setattr(Learner, "_pass", one)
    monkeypatch.setattr(Learner, "update", update)
    return learnt


def wait_for_all(self: Sampling, rows: Sequence[Row], *, judged: bool = False) -> None:
    """Instead of `Sampling._wait`."""
    self._scorer.wait(rows, self._rewards, judged=judged)


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
    lines = metrics_of(early.run)
    late = [line["scored_while_learning"] for line in lines]
    assert all(0 < share <= 1 for share in late), late
    with monkeypatch.context() as patch:
        patch.setattr(Sampling, "_wait", wait_for_all)
        patch.setattr(student.job.preparation, "connect", CONNECT)
        waiting = make_recipe(run=str(tmp_path / "waiting"), **one_row_first())
        waited = train(waiting)
    assert hashes(Path(found["checkpoint"])) == hashes(Path(waited["checkpoint"]))
    assert records(early) == records(waiting)
    assert all("scored_while_learning" not in line for line in records(waiting))


@pytest.mark.parametrize(
    ("how", "dropout", "at"),
    [
        pytest.param("signal", 0.2, 4, id="between two micro-batches"),
        pytest.param("outage", 0.0, 4, id="between two micro-batches, by an outage", marks=pytest.mark.slow),
        pytest.param("signal", 0.2, 9, id="behind the last micro-batch"),
    ],
)
def test_a_step_that_is_given_up_before_the_optimizer_is_taken_again(
    make_recipe: Callable[..., Recipe],
    world: Path,
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    how: str,
    dropout: float,
    at: int,
) -> None:
    model = shutil.copytree(world / "student", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}))
    changes = one_row_first(model={"path": str(model)})
    calm_recipe = make_recipe(run=str(tmp_path / "calm"), **changes)
    calm = train(calm_recipe)
    recipe = make_recipe(run=str(tmp_path / "cut"), **changes)
    arrive, calls = Sampling.arrive, []
    error = CancelledError if how == "signal" else OutageError

    def stopped(self: Sampling, rows: Sequence[Row]) -> None:
        calls.append(len(rows))
        # Of the second step; each waits for eight rows, with the gradient of each behind it, and at its end for all.
        if len(calls) == 9 + at:
            if how == "outage":
                raise OutageError("teacher 't' stayed away.")
            signal.raise_signal(signal.SIGINT)
            self._poll()
        arrive(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "arrive", stopped)
        patch.setattr(Scoring, "late", lambda self, rows: len(rows))  # however quick the teacher is
        with pytest.raises(error, match="1 of 2 steps, saved in"):
            train(recipe)
    assert calls[:9] == [1] * 8 + [8] and len(calls) == 9 + at
    resumed = train(recipe, resume=True)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(calm["checkpoint"]))
    assert records(recipe) == records(calm_recipe)


class Twice(Single):
    """Samples in two rounds."""

    @reads_no_scores
    def run(self, plan: Any, sampling: Any) -> list[Row]:
        first: list[Row] = sampling.score(sampling.sample(plan.rows))
        return first + sampling.score(sampling.sample(sampling.again(plan.rows)))  # type: ignore[no-any-return]


class Copying(Controller):
    """Gives copies of some rows, against its word."""

    @reads_no_scores
    def compose(self, rows: list[Row]) -> list[Row]:
        return [replace(row, weight=2.0) for row in rows[:3]]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rollout": {"strategy": {"name": "own:Twice"}}}, id="rounds"),
        pytest.param({"methods": [{"name": "own:Copying"}]}, id="copies"),
    ],
)
def test_rows_of_several_rounds_and_copies_get_their_scores(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(Twice=Twice, Copying=Copying))
    recipe = make_recipe(**one_row_first(**changes))
    train(recipe)
    lines = metrics_of(recipe.run)
    assert all(line["reverse_kl"] > 0 and 0 <= line["scored_while_learning"] <= 1 for line in lines)


def test_what_is_being_scored_is_given_up_where_a_step_fails_before_it_is_learnt(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Scoring] = []
    begin = Scoring.begin

    def kept(self: Scoring, *arguments: Any, **keywords: Any) -> None:
        begin(self, *arguments, **keywords)
        begun.extend([self] * self.begun)  # not where no row was asked about

    def fails(*_: Any) -> Any:
        raise DataError("a method that fails.")

    monkeypatch.setattr(Scoring, "begin", kept)
    monkeypatch.setattr(student.job.loop, "composed", fails)
    with pytest.raises(DataError):
        train(make_recipe(**one_row_first()))
    assert not begun[-1].begun


def test_heads_are_fetched_where_ranks_can_be_told_of_a_failure(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    within: list[bool] = []
    seen: list[bool] = []
    loss, head_of = Learner._pass, Scoring.head_of

    def noted(self: Learner, micro: Any, weights: Any, select: Any, arrived: Any) -> Any:
        arrived()
        within.append(True)
        try:
            return loss(self, micro, weights, select, None)
        finally:
            within.pop()

    def look(self: Scoring, *arguments: Any) -> Any:
        seen.append(bool(within))
        return head_of(self, *arguments)

    monkeypatch.setattr(Learner, "_pass", noted)
    monkeypatch.setattr(Scoring, "head_of", look)
    monkeypatch.setattr(Scoring, "late", lambda self, rows: len(rows))
    train(make_recipe(**one_row_first(objective=[{"name": "opd", "payload": "hidden"}])))
    assert seen[0] is False and True in seen


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
