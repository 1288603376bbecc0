"""The premise of rollout windows is measured on the world's own models before anything is trained."""

import re
from pathlib import Path

import pytest

from opd_lab.experiments import load_experiment
from opd_lab.plan import ExperimentPlan
from opd_lab.predict import Window
from opd_lab.tiny.summary import read_summary
from opd_lab.windows_premise import measure, quarter
from opd_lab.world import WorldModels


@pytest.mark.usefixtures("forked_servers")
def test_prefixes_stand_beside_random_tokens(world: Path, tmp_path: Path) -> None:
    summary = read_summary(world)
    assert summary is not None
    plan = ExperimentPlan(load_experiment("windows_restate"), "quick", tmp_path, {0: WorldModels(summary, "quick")})
    found = measure(plan, 0, least=2.0)
    assert not found.present, "no cosine is 2"
    cosines = re.findall(r"(\d+) tokens (-?\d\.\d\d|nan) \(random (-?\d\.\d\d|nan)\)", found.numbers)
    lengths = [int(tokens) for tokens, *_ in cosines]
    assert len(lengths) >= 2 and lengths == sorted(lengths)
    agreement = re.search(r"first choice in ((?:\S+ ){10})log-ratio", found.numbers)
    assert agreement, "the agreement is by tenth of the answer"


def test_the_decisive_window_is_the_quarter() -> None:
    windows = [Window(tokens, 0.5, 0.5, 0.5) for tokens in (4, 8, 16, 32)]
    assert quarter(windows) is windows[2], "a quarter of 64"
    assert quarter(windows[:1]) is None
