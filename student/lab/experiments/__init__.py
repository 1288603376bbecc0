"""The experiments, a file each; `opd lab list` shows them in this order."""

import importlib

from opd.errors import ConfigError
from student.lab.experiment import Experiment

_WHERE = {
    "estimators": "estimators:EXPERIMENT",
    "baselines": "baselines:EXPERIMENT",
    "windows_restate": "windows:RESTATE",
    "windows_parts": "windows:PARTS",
    "effopd": "effopd:EXPERIMENT",
    "exopd_one": "exopd:ONE",
    "exopd": "exopd:TWO",
    "correction": "correction:EXPERIMENT",
    "combinations": "combinations:EXPERIMENT",
}
NAMES = tuple(_WHERE)
"""In the order in which `make lab` runs them."""


def load_experiment(name: str) -> Experiment:
    """The experiment called `name`.

    Raises:
        ConfigError: when there is none.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no experiment {name!r}; known: {', '.join(NAMES)}.")
    module, _, attribute = _WHERE[name].partition(":")
    experiment: Experiment = getattr(importlib.import_module(f"student.lab.experiments.{module}"), attribute)
    return experiment
