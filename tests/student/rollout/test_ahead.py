"""Sampling ahead, by an engine that is told when it may go on: the weights of the launch, and no others."""

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from opd.errors import CancelledError, CheckpointError, DataError
from opd.tasks.prompt import Prompt
from student.data.plan import EpisodePlan, PlannedRow, StepPlan, plan_step
from student.data.row import RowKey
from student.data.states import plan_from_state, plan_to_state
from student.model.lora import add_lora
from student.model.ranks import Ranks
from student.plugin.traits import Traits
from student.rollout.ahead import Ahead, copy_of
from student.rollout.engine import (
    CopyEngine,
    EngineSetup,
    OnRow,
    RolloutEngine,
    RolloutEngineSettings,
    TransformersRollout,
    ignore,
)
from student.rollout.policy_sampler import PolicySampler
from student.rollout.requests import RolloutSpec
from student.settings.model import LoraSettings

ALONE = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))


class Engine(RolloutEngine):
    """Gives the weights that it has, once it may; its rows are pairs of key and weight."""

    traits = Traits(holds_weights=True)

    def __init__(self) -> None:
        super().__init__(RolloutEngineSettings(name="engine"))
        self.may, self.begun = threading.Event(), threading.Event()
        self.may.set()
        self.weight = 0.0

    def sync(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.version, self.weight = version, float(dict(parameters)["w"])

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Any]:
        self.begun.set()
        assert self.may.wait(120)
        if any(row.prompt.text == "bad" for row in planned):
            raise DataError("a prompt is too long.")
        rows: list[Any] = [(row.key.step, self.weight) for row in planned]
        for row in rows:
            on_row(row)
        return rows


class Learner:
    """One weight."""

    sharded = False

    def __init__(self) -> None:
        self.weight = torch.zeros(())
        self.updates = 0
        self.accelerator, self.ranks = ALONE, Ranks(ALONE)  # type: ignore[arg-type]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [("w", self.weight)]

    whole_parameters = named_parameters


PLAYER: Any = SimpleNamespace(plays=lambda planned: False)


def make(staleness: int, steps: int = 6) -> tuple[Ahead, Engine, Any]:
    engine, learner = Engine(), Learner()
    ahead = Ahead(staleness, steps, learner, lambda: nullcontext(engine), PLAYER, ignore)  # type: ignore[arg-type]
    return ahead, engine, learner


def plan(step: int, text: str = "1+1=") -> StepPlan:
    return plan_step(step, [Prompt.make(text)], samples=1, max_new_tokens=4, temperature=1.0)


def run(ahead: Ahead, learner: Any, steps: range, before: Callable[[int], None] = lambda step: None) -> list[Any]:
    """What a loop gets whose learner adds 1 in every step."""
    rows: list[Any] = []
    for step in steps:
        for later in ahead.due(step):
            ahead.launch(plan(later), version=step)
        before(step)
        rows += ahead.take(step, ahead.plan(step).rows, lambda: None).rows
        learner.weight += 1.0
        learner.updates += 1
        ahead.done(step + 1)
    return rows


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_step_has_the_weights_of_its_launch_whatever_the_learner_does_meanwhile(staleness: int) -> None:
    ahead, _, learner = make(staleness)
    assert run(ahead, learner, range(6)) == [(step, max(0.0, step - staleness)) for step in range(6)]
    assert list(ahead.due(6)) == [] and ahead.state_dict(6) == {"under_way": [], "weights": {}}
    ahead.close()


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_finished_run_with_more_steps_samples_the_first_of_them_with_its_last_weights(staleness: int) -> None:
    short, _, learner = make(staleness, steps=4)
    run(short, learner, range(4))
    saved = short.state_dict(4)
    short.close()
    longer, _, learner = make(staleness, steps=9)
    learner.weight += 4.0
    longer.load_state_dict(saved, 4)
    assert run(longer, learner, range(4, 9)) == [(step, max(4.0, step - staleness)) for step in range(4, 9)]
    longer.close()


def test_what_waits_for_more_rows_is_sent_when_all_of_a_step_are_sampled_and_not_when_it_is_learnt() -> None:
    told: list[Any] = []
    ended = threading.Event()

    def on_end() -> None:
        told.append("end")
        ended.set()

    engine, learner = Engine(), Learner()
    ahead = Ahead(1, 6, learner, lambda: nullcontext(engine), PLAYER, told.append, on_end)  # type: ignore[arg-type]
    ahead.launch(plan(0), version=0)
    assert ended.wait(120) and told == [(0, 0.0), "end"], "nothing has asked for the rows yet"
    ahead.close()


@pytest.mark.parametrize("stopped", [1, 3, 5])
def test_what_was_under_way_is_sampled_again_by_the_weights_it_had(stopped: int) -> None:
    calm, _, learner = make(2)
    expected = run(calm, learner, range(6))
    calm.close()
    first, _, learner = make(2)
    rows = run(first, learner, range(stopped))
    state = first.state_dict(stopped)
    assert len(state["under_way"]) == min(2, 6 - stopped)
    first.close()
    again, _, fresh = make(2)
    fresh.weight += float(stopped)
    again.load_state_dict(state, stopped)
    assert rows + run(again, fresh, range(stopped, 6)) == expected
    again.close()


def test_a_state_saved_within_a_step_holds_that_step_too() -> None:
    ahead, _, learner = make(1)
    rows = run(ahead, learner, range(2))
    states: list[dict[str, Any]] = []
    rows += run(ahead, learner, range(2, 3), before=lambda step: states.append(ahead.state_dict(2)))
    assert [one["plan"]["step"] for one in states[0]["under_way"]] == [2, 3]
    assert set(states[0]["weights"]) == {"1"}  # those of step 3 are the checkpoint's own
    again, _, fresh = make(1)
    fresh.weight += 2.0
    again.load_state_dict(states[0], 2)
    assert run(again, fresh, range(2, 6)) == [(2, 1.0), (3, 2.0), (4, 3.0), (5, 4.0)]
    for one in (ahead, again):
        one.close()


def test_a_failure_in_the_thread_is_that_of_its_own_step() -> None:
    ahead, _, _ = make(1)
    ahead.launch(plan(0), version=0)
    ahead.launch(plan(1, "bad"), version=0)
    assert ahead.take(0, ahead.plan(0).rows, lambda: None).rows == [(0, 0.0)]
    with pytest.raises(DataError, match="too long"):
        ahead.take(1, ahead.plan(1).rows, lambda: None)
    ahead.close()


def test_the_learner_may_give_up_while_it_waits_and_the_thread_ends_with_its_next_row() -> None:
    ahead, engine, _ = make(1)
    engine.may.clear()
    ahead.launch(plan(0), version=0)
    ahead.launch(plan(1), version=0)
    assert engine.begun.wait(120)

    def stopped() -> None:
        raise CancelledError("stopped by a signal")

    with pytest.raises(CancelledError, match="by a signal"):
        ahead.take(0, ahead.plan(0).rows, stopped)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    engine.may.set()
    closing.join(120)
    assert not closing.is_alive()
    with pytest.raises(CancelledError, match="has ended"):
        ahead.take(0, ahead.plan(0).rows, lambda: None)


def test_an_engine_with_weights_of_its_own_serves_both_threads_each_by_its_weights() -> None:
    engine, learner = Engine(), Learner()
    sampler = PolicySampler(engine, learner, PLAYER)  # type: ignore[arg-type]
    ahead = Ahead(1, 9, learner, sampler.lend, PLAYER, ignore)  # type: ignore[arg-type]
    evaluated: list[Any] = []
    rows = run(ahead, learner, range(4), before=lambda step: evaluated.extend(sampler.sample(plan(90).rows)))  # type: ignore[arg-type]
    assert rows == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0)]
    assert evaluated == [(90, 0.0), (90, 1.0), (90, 2.0), (90, 3.0)]
    ahead.close()


def test_rows_of_another_plan_and_weights_of_another_student_are_refused() -> None:
    ahead, _, _ = make(1)
    ahead.launch(plan(0), version=0)
    with pytest.raises(RuntimeError, match="not the rows"):
        ahead.take(0, plan(0, "2+2=").rows, lambda: None)
    state = {"under_way": [{"version": 0, "plan": plan_to_state(plan(1))}], "weights": {"0": {"other": torch.ones(1)}}}
    with pytest.raises(CheckpointError, match="this student's trained tensors"):
        ahead.load_state_dict(state, 1)
    ahead.close()


def test_a_plan_comes_back_from_a_checkpoint_as_it_was() -> None:
    import json

    chat = Prompt.make([{"role": "user", "content": "hi"}], answer="1", domain="d", extra={"path": ["a"]})
    rows = [
        PlannedRow(RowKey(3, chat.uid, 0), chat, 8, 0.7, tags={"mode": "x"}, stop_ids=frozenset({4, 2})),
        PlannedRow(
            RowKey(3, chat.uid, 1, turn=1), chat, 8, 0.7, prefix_ids=(1, 2), behaviour_prompt=Prompt.make("hint")
        ),
        PlannedRow(RowKey(3, "u", 0), Prompt.make("x"), 4, 1.0, answer="y", episode=EpisodePlan(2, ("go",))),
    ]
    whole = StepPlan(3, tuple(rows))
    state = json.loads(json.dumps(plan_to_state(whole)))
    assert len(state["prompts"]) == 3
    assert plan_from_state(state) == whole


def test_memory_of_a_device_is_kept_for_one_stream_however_many_steps_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    used: list[Any] = []

    def entered(stream: Any) -> Any:
        used.append(stream)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or len(made))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    engine, learner = Engine(), Learner()
    learner.accelerator = SimpleNamespace(device=torch.device("cuda"))
    ahead = Ahead(1, 5, learner, lambda: nullcontext(engine), PLAYER, ignore)  # type: ignore[arg-type]
    assert len(run(ahead, learner, range(5))) == 5
    ahead.close()
    assert made == [torch.device("cuda")] and used == [1] * 5


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_under_autocast_each_weight_is_cast_once_and_a_copy_gives_the_student_s_own_rows(
    world: Path, adapters: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    if adapters:
        add_lora(model, LoraSettings(rank=4, alpha=8), base=str(world / "student"))
    tokenizer = AutoTokenizer.from_pretrained(world / "student")
    spec = RolloutSpec(7, 64, 0, len(tokenizer), 40, autocast=torch.bfloat16)
    setup = EngineSetup(model, tokenizer, spec, "student")
    planned = plan_step(1, [Prompt.make("12+34=")], samples=4, max_new_tokens=12, temperature=1.0).rows
    itself, beside = TransformersRollout(RolloutEngineSettings(name="a")), CopyEngine(RolloutEngineSettings(name="b"))
    itself.open(setup)
    beside.open(dataclasses.replace(setup, model=copy_of(model)))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    beside.sync([(name, p.detach().clone()) for name, p in trained], 3)
    found = []
    for engine in (itself, beside):
        with Casts(engine.setup.model) as casts:
            found.append(engine.sample(planned))
        # The frozen base of adapters too: dozens of forwards, of which the trial of slots is one more that casts.
        assert sum(row.length for row in found[-1]) > 8 and 0 < max(casts.count.values()) <= 2
        assert any("base_layer" in name for name in casts.count) is adapters
        assert all(p.grad is None for p in engine.setup.model.parameters())
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [name for name, _ in trained]
    for one, other in zip(*found, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert one.behaviour_logp.tolist() == other.behaviour_logp.tolist()
    mine, theirs = (dict(engine.setup.model.named_parameters()) for engine in (itself, beside))
    for name in mine.keys() - {name for name, _ in trained}:  # a frozen base is not held twice
        assert mine[name].data_ptr() == theirs[name].data_ptr() and mine[name] is not theirs[name]


class Casts(TorchDispatchMode):
    """Counts how often each weight of a model is cast."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in model.named_parameters()}
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.names:
            self.count[self.names[args[0].data_ptr()]] += 1
        return function(*args, **(kwargs or {}))
