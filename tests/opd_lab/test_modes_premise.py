"""The premise of ORBIT is present where the modes' teachers differ as much as it asks, and its numbers are shown."""

import re
from pathlib import Path

from opd_lab.experiments import load_experiment
from opd_lab.modes_premise import measure
from opd_lab.plan import ExperimentPlan
from opd_lab.tiny.summary import read_summary
from opd_lab.world import WorldModels


def test_neighbours_have_to_differ_in_accuracy_and_in_tokens(world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    plan = ExperimentPlan(load_experiment("modes"), "quick", tmp_path, {0: WorldModels(summary, "quick")})
    # Every mode's teacher is one model that hardly knows anything: the budgets alone make its answers shorter.
    found = measure(plan, 0, points=-1.0, ratio=1.0)
    sampled, greedy = found.numbers.split("; greedy: ")
    for part in (sampled, greedy):
        assert re.search(r"long 0\.\d+ in \d+\.\d tokens, medium .*, short .*, neighbours [+-]\d", part)
    assert found.present
    assert not measure(plan, 0, points=1.0, ratio=1.0).present
    assert not measure(plan, 0, points=-1.0, ratio=2.5).present
