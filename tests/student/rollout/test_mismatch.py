"""The mismatch of engine and student: what it measures, on which rows, and when it stops the run."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import RolloutEngineError
from student.data.costs import Costs
from student.rollout.engine import RolloutEngineSettings
from student.rollout.mismatch import Mismatch
from student.rollout.vllm.settings import VllmSettings
from student.scoring.local import LocalModels


@pytest.fixture
def made(bench: Callable[..., Any]) -> Callable[..., tuple[Mismatch, Any, Costs]]:
    def make(**settings: Any) -> tuple[Mismatch, Any, Costs]:
        one, costs = bench(), Costs()
        learner = one.learner
        local = LocalModels(
            learner.student,
            learner.ranks,
            learner.settings,
            ema=None,  # type: ignore[arg-type]
            device=learner.accelerator.device,
            valid_vocab=len(one.tokenizer),
            temperature=1.0,
        )
        local.kept.start(["student"])
        found = RolloutEngineSettings(name="other", **settings)
        return Mismatch(found, local, learner.ranks, learner.accelerator.autocast, costs), one.rows(), costs

    return make


def test_it_is_zero_for_the_student_itself_and_the_shift_of_an_engine_that_is_off(made: Any) -> None:
    mismatch, rows, costs = made(mismatch_rows=4)
    assert mismatch.measure(rows, 0)["mismatch/log_ratio"] < 1e-4
    read = sum(len(row.prompt_ids) + row.length for row in rows[:4])
    assert costs.take()["cost/train/local_positions"] == read
    for row in rows:
        row.behaviour_logp = row.behaviour_logp - np.float32(0.1)
    off = mismatch.measure(rows, 0)
    assert off["mismatch/log_ratio"] == pytest.approx(0.1, abs=1e-4)
    assert off["mismatch/max_log_ratio"] == pytest.approx(0.1, abs=1e-4)
    assert off["mismatch/kl"] == pytest.approx(math.expm1(0.1) - 0.1, abs=1e-4)


@pytest.mark.parametrize("dropout", [False, True])
def test_it_reads_in_the_mode_in_which_the_student_learns(made: Any, dropout: bool) -> None:
    mismatch, rows, _ = made(mismatch_rows=4, mismatch_limit=0.01)
    student = mismatch._local._student
    for layer in student.lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    student.dropout = dropout
    student.train()
    if dropout:
        with pytest.raises(RolloutEngineError, match="mismatch_limit"):
            mismatch.measure(rows, 0)
    else:
        assert mismatch.measure(rows, 0)["mismatch/log_ratio"] < 1e-4


def test_only_tokens_that_the_present_weights_sampled_are_compared(made: Any) -> None:
    mismatch, rows, _ = made(mismatch_rows=99)
    rows[0].behaviour_logp[0] = np.nan  # given, not sampled
    rows[1].policy_version[:] = 3
    rows[1].behaviour_logp -= 9.0
    rows[2].origin = "expert"
    rows[2].behaviour_logp -= 9.0
    assert mismatch.measure(rows, 0)["mismatch/log_ratio"] < 1e-4
    assert mismatch.measure(rows, 3)["mismatch/log_ratio"] == pytest.approx(9.0, abs=1e-3)
    assert mismatch.measure(rows, 7) == {}


def test_rows_of_older_weights_are_compared_with_those_and_the_student_keeps_its_own(made: Any) -> None:
    mismatch, rows, _ = made(mismatch_rows=4, mismatch_limit=0.05)
    learner = mismatch._local._student.lm
    old = {name: p.detach().clone() for name, p in learner.named_parameters()}
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.mul_(0.5)
    now = [p.detach().clone() for p in learner.parameters()]
    assert mismatch.measure(rows, 0, old)["mismatch/log_ratio"] < 1e-4
    assert all(torch.equal(one, two) for one, two in zip(now, learner.parameters(), strict=True))
    with pytest.raises(RolloutEngineError, match="mismatch_limit"):
        mismatch.measure(rows, 0)


def test_a_limit_without_rows_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="mismatch_rows is 0"):
        RolloutEngineSettings(name="transformers", mismatch_limit=0.1)
    assert VllmSettings(name="vllm", mismatch_rows=0).mismatch_limit == 0.2  # the default alone asks for nothing


def test_over_its_limit_it_stops_the_run_and_without_rows_it_costs_nothing(made: Any) -> None:
    mismatch, rows, _ = made(mismatch_rows=2, mismatch_limit=0.05)
    mismatch.measure(rows, 0)
    rows[0].behaviour_logp -= 3.0
    with pytest.raises(RolloutEngineError, match=r"over rollout\.engine\.mismatch_limit 0\.05"):
        mismatch.measure(rows, 0)
    off, rows, costs = made()
    assert off.measure(rows, 0) == {} and not costs.take()
