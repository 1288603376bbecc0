"""vLLM's sleep, by a stand-in for its interface: what is asked of it, in which order, and what its errors become."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.model.ranks import Ranks
from student.rollout.engine import EngineSetup
from student.rollout.held_update import HeldUpdate
from student.rollout.known_row import KnownRow, Reader
from student.rollout.lost import EngineLostError
from student.rollout.policy_sampler import PolicySampler
from student.rollout.requests import RolloutSpec
from student.rollout.vllm.engine import VllmRollout
from student.rollout.vllm.settings import VllmSettings

ROWS = plan_step(1, [Prompt.make("1+1=")], samples=2, max_new_tokens=2, temperature=1.0).rows


class Llm:
    """Keeps what was asked of it."""

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked
        self.fails = ""

    def _take(self, name: str) -> None:
        self.asked.append(name)
        if name == self.fails:
            raise RuntimeError("CUDA error: out of memory")

    def sleep(self, level: int) -> None:
        assert level == 1
        self._take("sleep")

    def wake_up(self) -> None:
        self._take("wake_up")

    def collective_rpc(self, name: str, kwargs: Any) -> None:
        assert list(kwargs["weights_iterator"])
        self._take(name)

    def reset_prefix_cache(self) -> bool:
        self._take("reset_prefix_cache")
        return True


class Stood(VllmRollout):
    """The engine, with a stand-in for vLLM that answers with the student's numbers."""

    def __init__(self, settings: VllmSettings) -> None:
        super().__init__(settings)
        self.asked: list[str] = []

    def open(self, setup: EngineSetup) -> None:
        self.setup, self._dtype, self._longest = setup, "float32", 64
        self._held = HeldUpdate(setup.model, self._dtype)
        self._known = KnownRow.of(setup.spec, self._longest)
        self._llm = Llm(self.asked)

    def close(self) -> None:
        self.asked.append("close")
        self._llm, self._whole = None, False

    def _run(self, work: Sequence[Any], ended: Any) -> None:
        self.asked.append("run")
        for place, (draw, *_) in enumerate(work):
            if draw.forced(0) is None:
                draw.put(0, 5, -1.0, None)
                ended(place, [5])
                continue
            for at, logp in enumerate(Reader(self.setup.model, self.setup.spec).log_probs(self._known, self._given)):
                draw.put(at, self._known.answer[at], float(logp), None)


@pytest.fixture
def sleeper(world: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Stood, PolicySampler, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(world / "student")
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    engine = Stood(VllmSettings(name="vllm", sleep=True))
    engine.open(EngineSetup(model, tokenizer, RolloutSpec(7, 8, 0, len(tokenizer), 40), "student"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: engine.asked.append("empty_cache"))
    alone = SimpleNamespace(num_processes=1, process_index=0)
    ranks = Ranks(alone)  # type: ignore[arg-type]
    learner: Any = SimpleNamespace(updates=0, named_parameters=model.named_parameters, ranks=ranks, sharded=False)
    return engine, PolicySampler(engine, learner, SimpleNamespace(plays=lambda row: False)), learner  # type: ignore[arg-type]


SYNC = ["reload_weights", "reset_prefix_cache", "run"]


def test_the_learner_s_freed_memory_is_given_back_before_vllm_wakes(sleeper: Any) -> None:
    engine, sampler, learner = sleeper
    assert len(sampler.sample(ROWS)) == 2
    assert engine.asked == [*SYNC, "run", "sleep"]
    learner.updates += 1
    sampler.sample(ROWS)
    assert engine.asked[5:] == ["empty_cache", "wake_up", *SYNC, "run", "sleep"]
    sampler.sample(ROWS)  # the same weights
    assert engine.asked[12:] == ["empty_cache", "wake_up", "run", "sleep"]


def test_a_rank_without_rows_sleeps_too_and_so_does_an_engine_that_is_given_back(sleeper: Any) -> None:
    engine, sampler, _ = sleeper
    assert sampler.sample([]) == []
    assert engine.asked == [*SYNC, "sleep"]
    with sampler.lend() as lent:
        lent.sync(engine.setup.model.named_parameters(), 1)
    assert engine.asked[4:] == ["empty_cache", "wake_up", *SYNC, "sleep"]


def test_an_engine_that_does_not_wake_is_started_again(sleeper: Any) -> None:
    engine, sampler, _ = sleeper
    sampler.sample(ROWS)
    engine._llm.fails = "wake_up"
    assert len(sampler.sample(ROWS)) == 2
    assert engine.asked[5:] == ["empty_cache", "wake_up", "close", *SYNC, "run", "sleep"]
    assert engine.take()["engine/restarts"] == 1


def test_its_errors_are_ours_with_what_to_change(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sampler, _ = sleeper
    engine._llm.fails = "sleep"
    with pytest.raises(EngineLostError, match=r"not free .*memory; .*rollout.engine.sleep \("):
        sampler.sample(ROWS)
    assert engine.asked[-1] == "close"
    engine.open(engine.setup)
    sampler.moved(1)
    sampler.sample(ROWS)
    engine._llm.fails = "wake_up"
    monkeypatch.setattr("student.rollout.vllm.launch.alone", lambda: False)  # several ranks: no engine starts anew
    with pytest.raises(EngineLostError, match=r"not wake up; .* \(RuntimeError: CUDA error: .*\)"):
        sampler.sample(ROWS)
