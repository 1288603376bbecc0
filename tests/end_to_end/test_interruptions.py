"""A run that stops in the middle of a step, at any stage of it, resumes to the weights and metrics of a calm one."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from ports import held_port
from run_records import metrics_of, records
from slow_cases import slow

from opd.errors import CancelledError, NonFiniteError, OpdError, OutageError, PluginError
from opd.fleet.membership.members import Members
from student.commands.dry_run import check as check_recipe
from student.data.report import StepReport
from student.data.row import Row
from student.data.token_batch import TokenBatch
from student.job.services import LoopServices
from student.job.session import train
from student.methods.distil.opd import OnPolicyDistillation
from student.methods.windows.probe import Prober
from student.plugin.controllers import Controller, Services
from student.plugin.terms import TermOutput
from student.run.folder import RunFolder
from student.run.interrupts import Interrupts
from student.settings.recipe import Recipe

EFFOPD = {
    "name": "effopd",
    "tries": 3,
    "gate": {"kind": "reverse_kl", "prompts": 8, "gain": 0.0, "length_tolerance": 9, "truncation_tolerance": 1},
}
ADWIN = {"name": "adwin", "windows": [2, 4], "rows": 8, "folds": 2, "delay": 1, "null_every": 0, "rho": 0.3}
PRUNE = {"name": "prune_opd", "k": 8, "threshold": 0.6, "smoothing": 2, "shortest": 2, "quantile": 0.5}
EXACT = [{"name": "opd", "payload": "hidden", "aggregation": "constant"}]


def stop_at(monkeypatch: pytest.MonkeyPatch, cls: type, method: str, call: int, how: str) -> None:
    """Have the `call`-th call of a method meet a Ctrl-C, or fail because a teacher is away."""
    original, calls = getattr(cls, method), []

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            if how == "outage":
                raise OutageError("teacher 't' stayed away.")
            signal.raise_signal(signal.SIGINT)
        return original(*arguments, **keywords)

    monkeypatch.setattr(cls, method, wrapper)


CALM: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {}
"""Weights and metrics of runs that nothing interrupted, by their recipes: most cases here share one."""


@pytest.fixture
def check(
    make_recipe: Callable[..., Recipe], tmp_path: Path, hashes: Callable[[Path], dict[str, str]]
) -> Callable[..., str]:
    """Run a recipe calmly, and interrupted and resumed; compares both and gives the message of the interruption."""

    def calm(**changes: Any) -> tuple[dict[str, str], list[dict[str, Any]]]:
        recipe = make_recipe(run=str(tmp_path / "calm"), **changes)
        key = recipe.model_dump_json(exclude={"run"})
        if key not in CALM:
            summary = train(recipe)
            CALM[key] = hashes(Path(summary["checkpoint"])), records(recipe)
        return CALM[key]

    def run(stop: Callable[[pytest.MonkeyPatch], None], **changes: Any) -> str:
        changes = {"train": {"steps": 4, "checkpoint_every": 0}, "eval": {"prompts": 0}, **changes}
        weights, metrics = calm(**changes)
        recipe = make_recipe(run=str(tmp_path / "cut"), **changes)
        with pytest.MonkeyPatch.context() as patch:
            stop(patch)
            with pytest.raises(OpdError) as caught:
                train(recipe)
        assert not (recipe.run / "summary.json").exists()
        resumed = train(recipe, resume=True)
        assert hashes(Path(resumed["checkpoint"])) == weights
        assert records(recipe) == metrics
        for line in metrics_of(recipe.run):
            # Also of the step that was interrupted after its update, whose rollout the resumed process never saw.
            assert {"rollout", "learn"} <= line["seconds"].keys()
            assert line["tokens_per_second"] == pytest.approx(line["response_tokens"] / sum(line["seconds"].values()))
        message = str(caught.value)
        assert isinstance(caught.value, CancelledError) == message.startswith("stopped after"), message
        return message

    return run


@pytest.mark.parametrize(
    ("how", "call"),
    [("outage", 2), *slow(("signal", 1), ("outage", 1), ("signal", 2), ("signal", 5), ("outage", 5))],
)
def test_a_search_of_effopd_that_is_broken_off_leaves_no_trace(check: Callable[..., str], call: int, how: str) -> None:
    message = check(
        lambda patch: stop_at(patch, LoopServices, "evaluate", call, how), objective=EXACT, methods=[EFFOPD]
    )
    assert "saved in" in message and "continue with --resume" in message


@pytest.mark.slow
def test_a_search_after_the_last_update_ends_in_the_last_checkpoint(check: Callable[..., str]) -> None:
    original, calls = LoopServices.evaluate, []

    def evaluate(self: Any, *arguments: Any, seed_names: Any, **keywords: Any) -> Any:
        calls.extend([1] * (seed_names == ("effopd", 4)))
        if len(calls) == 2:
            raise OutageError("teacher 't' stayed away.")
        return original(self, *arguments, seed_names=seed_names, **keywords)

    message = check(lambda patch: patch.setattr(LoopServices, "evaluate", evaluate), objective=EXACT, methods=[EFFOPD])
    assert "after 4 of 4 steps" in message


class Killed(BaseException):
    """What ends a process without another word."""


def test_a_kill_between_a_checkpoint_and_its_line_of_metrics_loses_no_line(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(name: str) -> Recipe:
        train_settings = {"steps": 3, "checkpoint_every": 1}
        return make_recipe(run=str(tmp_path / name), train=train_settings, eval={"prompts": 0})

    def killed(folder: RunFolder, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            raise Killed
        original(folder, record)

    train(recipe("calm"))
    original = RunFolder.append_metrics
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", killed)
        with pytest.raises(Killed):
            train(recipe("cut"))
    assert [line["step"] for line in records(recipe("cut"))] == [1]
    assert (recipe("cut").run / "checkpoints" / "step-000002").is_dir()
    train(recipe("cut"), resume=True)
    assert records(recipe("cut")) == records(recipe("calm"))


@pytest.mark.parametrize(("call", "background"), [(1, True), *slow((2, False), (1, False), (2, True))])
def test_a_probe_of_adwin_that_is_broken_off_is_taken_again(
    check: Callable[..., str], call: int, background: bool
) -> None:
    method = {**ADWIN, "background": background}
    assert "--resume" in check(
        lambda patch: stop_at(patch, Prober, "_measure", call, "signal"), objective=EXACT, methods=[method]
    )


@pytest.mark.parametrize(
    ("how", "call"),
    [("signal", 5), *slow(("signal", 1), ("outage", 1), ("signal", 3), ("outage", 3), ("outage", 5))],
)
def test_an_evaluation_that_is_broken_off_is_made_again(check: Callable[..., str], call: int, how: str) -> None:
    """The first of five evaluations is before the first step, the last one after the last."""
    message = check(lambda patch: stop_at(patch, LoopServices, "evaluate", call, how), eval={"prompts": 8, "every": 1})
    # Without an update there is nothing to save.
    assert ("saved in" in message) == (call > 1) and f"after {call - 1} of 4 steps" in message
    assert "continue with --resume" in message


def test_a_window_is_chosen_from_the_rows_of_a_step_that_was_interrupted_after_its_update(
    check: Callable[..., str],
) -> None:
    """The search of EffOPD comes before Prune-OPD's choice."""
    check(lambda patch: stop_at(patch, LoopServices, "evaluate", 1, "signal"), objective=EXACT, methods=[EFFOPD, PRUNE])


class Faulty(Controller):
    """A plug-in with a fault of its own, in the hook that `hook` names, at the fourth call."""

    hook: ClassVar[str] = ""
    calls: ClassVar[int] = 0

    def _call(self, hook: str) -> None:
        Faulty.calls += hook == Faulty.hook
        if hook == Faulty.hook and Faulty.calls == 4:
            for _, tensor in self.services.parameters():
                tensor.data.mul_(0.0 if hook == "after_update" else 1.0)
            raise KeyError("a fault of the plug-in")

    def compose(self, rows: list[Row]) -> list[Row]:
        self._call("compose")
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        self._call("after_update")
        return {}

    def observe(self, report: StepReport) -> None:
        self._call("observe")


@pytest.mark.parametrize(
    ("hook", "done"),
    [
        ("compose", "3 of 4 steps, saved in .*step-000003; continue"),
        # It has moved weights, or its state, by half.
        ("after_update", "4 of 4 steps, unsaved because .*; continue"),
        *slow(("observe", "4 of 4 steps, unsaved because .*; continue")),
    ],
)
def test_a_fault_of_a_plug_in_is_named_and_only_whole_steps_are_saved(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    hashes: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    done: str,
) -> None:
    monkeypatch.setitem(sys.modules, "faulty", SimpleNamespace(Faulty=Faulty))
    monkeypatch.setattr(Faulty, "hook", hook)
    monkeypatch.setattr(Faulty, "calls", 0)
    changes = {"methods": [{"name": "faulty:Faulty"}], "eval": {"prompts": 0}, "train": {"checkpoint_every": 2}}
    recipe = make_recipe(run=str(tmp_path / "cut"), **changes)
    said = rf"'faulty:Faulty' failed in {hook}: KeyError: 'a fault of the plug-in'.* after {done} with --resume"
    with pytest.raises(PluginError, match=said):
        train(recipe)
    resumed = train(recipe, resume=True)
    calm = make_recipe(run=str(tmp_path / "calm"), **changes)
    assert hashes(Path(resumed["checkpoint"])) == hashes(Path(train(calm)["checkpoint"]))
    assert records(recipe) == records(calm)


def test_a_step_whose_optimizer_failed_half_way_is_not_saved_as_if_it_had_not_begun(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = torch.optim.AdamW.step, []

    def fails(self: Any, *arguments: Any, **keywords: Any) -> Any:
        step(self, *arguments, **keywords)
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    recipe = make_recipe(eval={"prompts": 0}, train={"checkpoint_every": 0})
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(recipe)
    assert not getattr(caught.value, "__notes__", []) and not list((recipe.run / "checkpoints").glob("step-*"))


class Witness(Controller):
    """Remembers what it was told."""

    seen: ClassVar[list[StepReport]] = []

    def observe(self, report: StepReport) -> None:
        Witness.seen.append(report)


@pytest.mark.slow
def test_a_controller_observes_after_a_resume_what_it_would_have_observed(
    check: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "witness", SimpleNamespace(Witness=Witness))
    monkeypatch.setattr(Witness, "seen", [])
    monkeypatch.setitem(globals(), "CALM", {})  # both runs are made here
    check(
        lambda patch: stop_at(patch, LoopServices, "evaluate", 2, "signal"),
        objective=EXACT,
        methods=[EFFOPD, {"name": "witness:Witness"}],
    )
    calm, resumed = Witness.seen[:4], Witness.seen[4:]
    assert [report.step for report in resumed] == [0, 1, 2, 3]
    for one, other in zip(calm, resumed, strict=True):
        assert one.outcomes == other.outcomes and len(one.outcomes) == 8
        assert one.outcomes[0].sums["behaviour"] < 0 and one.outcomes[0].length > 0


class Broken(OnPolicyDistillation):
    """Its loss is infinite in the third step."""

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        output = super().token_losses(batch)
        assert output.loss is not None
        factor = float("inf") if batch.rows[0].key.step == 2 else 1.0
        return TermOutput(output.loss * factor, metrics=output.metrics)


def test_a_step_without_finite_gradient_loses_nothing(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, hashes: Callable[[Path], dict[str, str]]
) -> None:
    monkeypatch.setitem(sys.modules, "broken", SimpleNamespace(Broken=Broken))
    changes = {"train": {"steps": 4, "checkpoint_every": 0}}
    recipe = make_recipe(objective=[{"name": "broken:Broken", "k": 8}], **changes)
    with pytest.raises(NonFiniteError, match=r"not finite.* 2 of 4 steps.*step-000002"):
        train(recipe)
    resumed = train(make_recipe(**changes), resume=True)
    calm = train(make_recipe(run=str(recipe.run) + "2", **changes))
    assert hashes(Path(resumed["checkpoint"]) / "model") == hashes(Path(calm["checkpoint"]) / "model")


def test_a_resumed_run_says_that_its_teacher_has_other_weights(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    def recipe(steps: int) -> Recipe:
        return make_recipe(train={"steps": steps}, eval={"prompts": 0})

    train(recipe(1))
    assert "when the run began" not in check_recipe(recipe(2), offline=False, resume=True)
    record = recipe(1).run / "provenance.json"
    began = json.loads(record.read_text())
    now = began["fleet"]["teacher"]["weights_hash"]
    began["fleet"]["teacher"]["weights_hash"] = "5" * 64
    record.write_text(json.dumps(began))
    said = f"warning: teacher 'teacher' now has weights {now[:12]}, but had 555555555555 when the run began"
    assert said in check_recipe(recipe(2), offline=False, resume=True)
    train(recipe(2), resume=True)
    assert said in " ".join(capsys.readouterr().err.split())
    record.write_text("{}")  # a record for people: nothing depends on it
    train(recipe(3), resume=True)
    assert "when the run began" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_says_that_its_prompt_file_has_changed(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sums.jsonl"

    def write(count: int) -> None:
        path.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(count)))

    def recipe(steps: int) -> Recipe:
        return make_recipe(prompts={"file": str(path)}, train={"steps": steps}, eval={"prompts": 0})

    write(40)
    train(recipe(1))
    train(recipe(2), resume=True)
    assert "have changed" not in capsys.readouterr().err
    write(41)
    said = f"warning: the prompts of {path} have changed since this run read them (rows: 40 then, 41 now)"
    assert said in check_recipe(recipe(3), offline=False, resume=True)
    train(recipe(3), resume=True)
    assert said in " ".join(capsys.readouterr().err.split())
    train(recipe(4), resume=True)
    assert "have changed" not in capsys.readouterr().err


@pytest.mark.parametrize("served", [False, True])
def test_a_run_that_waits_for_its_teachers_stops_at_the_first_signal(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """Also if one has answered, and the others have not been checked yet."""
    stop_at(monkeypatch, Interrupts, "poll", 1, "signal")
    if served:
        monkeypatch.setattr(Members, "settle", lambda self, seconds: asyncio.Event().wait())
    away = {} if served else {"endpoints": [f"127.0.0.1:{held_port()}"]}
    recipe = make_recipe(teachers={**away, "fleet": {"connect_seconds": 60}})
    with pytest.raises(CancelledError):
        train(recipe)
    assert not recipe.run.exists()
