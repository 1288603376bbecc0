"""The experiments, a file each; `opd lab list` shows them in this order."""

import importlib

from opd.errors import ConfigError
from student.lab.experiment import Experiment

NAMES = ("estimators",)
"""In the order in which `make lab` runs them."""


def load_experiment(name: str) -> Experiment:
    """The experiment called `name`.

    Raises:
        ConfigError: when there is none.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no experiment {name!r}; known: {', '.join(NAMES)}.")
    experiment: Experiment = importlib.import_module(f"student.lab.experiments.{name}").EXPERIMENT
    return experiment
