"""The lab's experiments, one file per group; `opd lab list` shows them in the order of `NAMES`."""

import importlib
import importlib.util
from pathlib import Path
from typing import get_args

from opd.errors import ConfigError
from opd.registry import hint
from opd_lab.experiment import OF_DOMAIN, OF_METRIC, OF_MODE, TUNING_SEED, VALUE, Experiment, Measure
from opd_lab.tiny.plans import training_seeds
from opd_lab.tiny.presets import world_plan

_WHERE = {
    "baselines": "baselines:SUMS",
    "baselines_sorting": "baselines:SORTING",
    "estimators": "estimators:EXPERIMENT",
    "shaping": "shaping:EXPERIMENT",
    "windows_restate": "windows:RESTATE",
    "windows_parts": "windows:PARTS",
    "windows_long": "windows:LONG",
    "effopd": "effopd:EXPERIMENT",
    "exopd_one": "exopd:ONE",
    "exopd": "exopd:TWO",
    "budgets": "budgets:EXPERIMENT",
    "correction": "correction:EXPERIMENT",
    "combinations": "combinations:EXPERIMENT",
    "modes": "modes:EXPERIMENT",
    "lock": "lock:EXPERIMENT",
    "rooms": "rooms:EXPERIMENT",
    "hints": "hints:EXPERIMENT",
    "rl_losses": "rl_losses:EXPERIMENT",
    "rl_advantages": "rl_advantages:EXPERIMENT",
    "rl_samplers": "rl_samplers:EXPERIMENT",
    "rl_strategies": "rl_strategies:EXPERIMENT",
    "rl_lengths": "rl_lengths:EXPERIMENT",
}
NAMES = tuple(_WHERE)
"""Names of the experiments, in the order in which `make lab` runs them."""


def load_experiment(name: str) -> Experiment:
    """Load the experiment called `name`, or, if `name` ends in .py, EXPERIMENT of the Python file at that path.

    Raises:
        ConfigError: when there is none, the file cannot be imported, or `check` fails.
    """
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in NAMES:
        raise ConfigError(f"experiment {name!r} is unknown; give a name or the path of a .py file; {hint(name, NAMES)}")
    module, _, attribute = _WHERE[name].partition(":")
    experiment: Experiment = getattr(importlib.import_module(f"opd_lab.experiments.{module}"), attribute)
    return check(experiment)


def _from_file(path: Path) -> Experiment:
    spec = importlib.util.spec_from_file_location(f"lab_experiment_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"{path} does not exist; give the Python file of an experiment.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file may raise
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    found = getattr(module, "EXPERIMENT", None)
    if not isinstance(found, Experiment):
        raise ConfigError(f"{path} has no EXPERIMENT of class opd_lab.experiment.Experiment; define one.")
    return check(found, path)


def check(experiment: Experiment, source: object = "") -> Experiment:
    """Check that the parts of an experiment fit together, and return it.

    Args:
        experiment: the experiment.
        source: file to name in errors; empty for an experiment of the lab.

    Raises:
        ConfigError: for too few worlds or replicates, a seed of both worlds and runs, or a claim about an arm, model,
            measure or premise that does not exist.
    """
    where = f"{source}: " if source else f"experiment {experiment.name}: "
    if len(experiment.worlds) < 2 or len(experiment.replicates) < 5:
        raise ConfigError(
            f"{where}{len(experiment.worlds)} worlds and {len(experiment.replicates)} replicates are too few for an "
            "interval; give at least two worlds and five replicates."
        )
    taken = {*experiment.worlds} | set(training_seeds(world_plan(str(experiment.world_file)), experiment.worlds))
    shared = sorted(taken & {*experiment.seeds, TUNING_SEED})
    if shared:
        raise ConfigError(
            f"{where}seed {shared[0]} is both a world's and a run's, so the run would reuse prompts that the world's "
            "models were trained on; give it another."
        )
    arms = {arm.name for arm in experiment.arms}
    models = {f"model:{name}" for name in experiment.evaluated}
    premises = {premise.name for premise in experiment.premises}
    for claim in experiment.claims:
        # A rival is an arm, an evaluated model, or a number.
        known = claim.rival in arms | models or claim.rival.startswith(VALUE)
        if claim.measure not in get_args(Measure) and not claim.measure.startswith((OF_MODE, OF_METRIC, OF_DOMAIN)):
            raise ConfigError(
                f"{where}the claim {claim.text!r} is about {claim.measure!r}, which the experiment does not measure."
            )
        if claim.arm not in arms or not known:
            raise ConfigError(
                f"{where}the claim {claim.text!r} compares {claim.arm!r} with {claim.rival!r}; name arms of the "
                "experiment."
            )
        if claim.premise is not None and claim.premise not in premises:
            raise ConfigError(f"{where}the claim {claim.text!r} has the unknown premise {claim.premise!r}.")
    return experiment
