"""Every mechanism of the experiments on reinforcement is seen to act in their short form."""

from dataclasses import replace
from pathlib import Path

import pytest

from opd_lab.experiments import NAMES, load_experiment
from opd_lab.plan import ExperimentPlan
from opd_lab.runs import train_run
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels

UNSEEN = {("rl_losses", "confident_share")}
"""What needs a student that is sure of some token, which the test world's is not."""


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("rl_")])
def test_what_an_arm_adds_acts(name: str, world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    experiment = load_experiment(name)
    experiment = replace(experiment, quick={**experiment.quick, "eval.prompts": 0, "train.checkpoint_every": 0})
    # No teacher is asked, so none is served.
    plan = ExperimentPlan(experiment, "quick", tmp_path, {0: WorldModels(summary, "quick")}, ("127.0.0.1:1",))
    arms = [arm for arm in experiment.arms if arm.fires]
    assert len(arms) >= 4
    for arm in arms:
        records = train_run(plan.run(arm, plan.replicates[0], plan.rates(arm)[0])).records()
        idle = [f.metric for f in arm.fires if (name, f.metric) not in UNSEEN and not f.seen(records)]
        assert not idle, f"{arm.name}: {idle} never acted"
        assert any(record.get("reward", 0.0) > 0 for record in records), arm.name
