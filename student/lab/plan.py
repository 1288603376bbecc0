"""From an experiment to its runs: which recipe each arm, seed and learning rate gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from student.lab.experiment import TUNING_SEED, Arm, Experiment
from student.lab.runs import Run, flatten, merge
from student.lab.tiny.presets import world_plan
from student.lab.world import Cast


@dataclass(frozen=True, slots=True)
class Plan:
    """Builds the runs of one experiment in one form.

    Attributes:
        experiment: what to run.
        form: "full" or "quick".
        root: folder of the lab.
        cast: the models.
        addresses: of the teacher servers; none when only finished runs are read.
    """

    experiment: Experiment
    form: str
    root: Path
    cast: Cast
    addresses: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the experiment's runs are."""
        return self.root / self.form / self.experiment.name

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the form."""
        return self.experiment.seeds if self.form == "full" else self.experiment.seeds[:2]

    @property
    def answers(self) -> Path:
        """File with the teacher's answers, for arms that learn from them."""
        return self.folder / "answers.jsonl"

    def recipe(self, arm: Arm, seed: int, rate: float) -> dict[str, Any]:
        """The complete recipe of a run, without its folder."""
        experiment = self.experiment
        tasks = world_plan("lab").tasks
        mix = [tasks[name].model_dump(mode="json", exclude_defaults=True) for name in experiment.tasks]
        base: dict[str, Any] = {
            "seed": seed,
            "model": {"path": str(self.cast.model("base").path)},
            "teachers": {
                "endpoints": list(self.addresses),
                "default": experiment.served[0],
                "routes": dict(experiment.routes),
            },
            "prompts": mix[0] if len(mix) == 1 else {"mix": mix},
        }
        recipe = merge(merge(base, flatten(experiment.recipe)), self._resolved(arm.overrides))
        recipe = merge(recipe, {"train.learning_rate": rate, "train.threads": 1})
        return recipe if self.form == "full" else merge(recipe, self._quick(recipe))

    def _quick(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The short form's overrides; those of a method apply to arms that have one with such a key."""
        methods = recipe.get("methods", [])
        first = methods[0] if methods else {}
        return {
            key: value
            for key, value in self.experiment.quick.items()
            if not key.startswith("methods.0.") or key.split(".")[2] in first
        }

    def _resolved(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        return {k: str(self.answers) if v == "{answers}" else v for k, v in overrides.items()}

    def run(self, arm: Arm, seed: int, rate: float) -> Run:
        """The run of an arm with a seed and a learning rate."""
        name = f"seed-{seed}" if seed != TUNING_SEED else f"tune-{rate:g}"
        return Run(arm.name, seed, self.folder / arm.name / name, self.recipe(arm, seed, rate), rate)

    def default_rate(self) -> float:
        """The recipe's own learning rate."""
        return float(self.experiment.recipe["train"]["learning_rate"])

    def rates(self, arm: Arm) -> tuple[float, ...]:
        """Rates to sweep for an arm; one rate needs no sweep. The short form sweeps two, for the first arm only."""
        rates = arm.learning_rates or (float(arm.overrides.get("train.learning_rate", self.default_rate())),)
        return rates if self.form == "full" else rates[: 2 if arm is self.experiment.arms[0] else 1]

    def tuning(self, arm: Arm) -> list[Run]:
        """Runs that choose the learning rate of an arm; none when there is nothing to choose."""
        rates = self.rates(arm)
        if arm.same_rate_as is not None or len(rates) == 1:
            return []
        return [self.run(arm, TUNING_SEED, rate) for rate in rates]
