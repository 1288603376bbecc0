"""What the report shows besides numbers of arms."""

import math
from pathlib import Path
from typing import Any

from matplotlib import pyplot

from opd_lab.curve import Curve
from opd_lab.experiment import ROUTED
from opd_lab.plots import _plot_arm
from opd_lab.report import _domains, _modes
from opd_lab.stored import FORMAT, read_stored, write_stored


def level(**figures: float) -> dict[str, Any]:
    return {"accuracy": 0.5, "modes": {name.replace("_", "/"): value for name, value in figures.items()}}


def test_modes_have_a_row_for_every_model_and_arm_with_their_means() -> None:
    figures = {"tokens_long": 14.0, "accuracy_long": 0.9, "hypervolume": 0.5}
    data = {
        "models": {ROUTED: {"w0-s10": level(**figures)}, "base": {}},
        "arms": [
            {
                "title": "ORBIT",
                "seeds": [{"level": level(**figures)}, {"level": level(**figures | {"tokens_long": 16.0})}],
            }
        ],
    }
    teachers, orbit = _modes(data)
    assert teachers["title"] == "each prompt's own teacher" and teachers["monotone"] == ""
    assert orbit == {"title": "ORBIT", "modes": "long 0.900 in 15.0", "monotone": "", "hypervolume": "0.500"}
    assert _modes({"models": {"base": {"w0-s10": level()}}, "arms": []}) == []


def test_domains_have_a_column_each_where_there_are_several() -> None:
    levels = [{"accuracy": 0.5, "domains": {"sums": 0.4, "restate": 0.6}} for _ in range(2)]
    data = {
        "models": {"base": {"w0-s10": {"accuracy": 0.1, "domains": {"sums": 0.1}}}},
        "arms": [{"title": "balanced", "seeds": [{"level": level} for level in levels]}],
    }
    assert _domains(data) == [{"title": "balanced", "cells": {"sums": "0.400", "restate": "0.600"}}]


def test_a_kept_section_leaves_out_divergences_that_were_not_measured(tmp_path: Path) -> None:
    curve = {"steps": [0, 2, 4], "tokens": [0.0, 8.0, 16.0], "flops": [0.0, 1.0, 2.0], "accuracy": [0.1, None, 0.5]}
    seed = {"replicate": "w0-s10", "totals": {}, "curve": {**curve, "reverse_kl": [0.9, None, 0.3]}}
    arm = {"last_gain": math.nan, "seeds": [seed]}
    write_stored(tmp_path / "a.json", {"format": FORMAT, "form": "full", "arms": [arm], "models": {}})
    data = read_stored(tmp_path / "a.json", "full")
    assert data is not None and math.isnan(data["arms"][0]["last_gain"])
    found = Curve(**data["arms"][0]["seeds"][0]["curve"])
    assert found.final("reverse_kl") == 0.3 and math.isnan(found.accuracy[1])


def test_a_mean_is_drawn_only_where_all_seeds_have_values() -> None:
    figure, axes = pyplot.subplots()
    curves = [
        {"tokens": [0, 10, 20], "accuracy": [None, 0.2, 0.4]},
        {"tokens": [0, 5, 30], "accuracy": [0.1, 0.2, 0.3]},
    ]
    _plot_arm(axes, {"title": "arm", "seeds": [{"curve": curve} for curve in curves]}, "tokens", "accuracy", "red")
    (mean,) = [line for line in axes.get_lines() if line.get_label() == "arm"]
    x = mean.get_xdata()
    assert (x[0], x[-1]) == (10, 20)
    pyplot.close(figure)
