"""Derives the runs of an experiment: the recipe and folder of each arm, replicate and learning rate."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.config.text import flatten
from opd_lab.experiment import TUNING_SEED, Arm, Experiment, Replicate
from opd_lab.runs import Run, content_key, lasting, merge
from opd_lab.tiny.presets import world_plan
from opd_lab.world import WorldModels

_ANSWERS = re.compile(r"\{answers:(\w+)\}")


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """Builds the runs of one experiment in one form.

    Attributes:
        experiment: the experiment.
        form: "full", or "quick" for the short form.
        root: folder of the lab. It may be moved, with everything in it, while nothing runs.
        models: models of each world, by its seed.
        addresses: addresses of the teacher servers; empty when only finished runs are read.
    """

    experiment: Experiment
    form: str
    root: Path
    models: Mapping[int, WorldModels]
    addresses: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the experiment's runs."""
        return self.root / self.form / self.experiment.name

    @property
    def replicates(self) -> tuple[Replicate, ...]:
        """The replicates of this form; the short form has two run seeds in one world."""
        if self.form == "full":
            return self.experiment.replicates
        return tuple(Replicate(self.experiment.worlds[0], seed) for seed in self.experiment.seeds[:2])

    @property
    def worlds(self) -> tuple[int, ...]:
        """The seeds of the worlds of this form."""
        return tuple(dict.fromkeys(replicate.world for replicate in self.replicates))

    @property
    def tuning_replicate(self) -> Replicate:
        """The replicate on which learning rates are chosen: a separate run seed in the first world."""
        return Replicate(self.worlds[0], TUNING_SEED)

    def world_folder(self, world: int) -> Path:
        """The folder of the runs in a world."""
        return self.folder / f"world-{world}"

    def answers(self, world: int, how: str) -> Path:
        """The path of the file with a teacher's answers, chosen by `how`. Its name depends on all that decides them."""
        recipe = self.recipe(Arm("answers", ""), Replicate(world, world), self.default_rate())
        seeds = [replicate.seed for replicate in (*self.replicates, self.tuning_replicate) if replicate.world == world]
        parts = [lasting(recipe), seeds, self.experiment.answers_of, self.models[world].world.key]
        return self.world_folder(world) / f"answers-{how}-{content_key(self.root, parts)[:8]}.jsonl"

    def answer_kinds(self, arms: Iterable[Arm]) -> tuple[str, ...]:
        """The values of HOW in the `{answers:HOW}` of the arms' overrides, each once."""
        found = [m[1] for arm in arms for v in arm.overrides.values() if (m := _match(v))]
        return tuple(dict.fromkeys(found))

    def recipe(self, arm: Arm, replicate: Replicate, rate: float) -> dict[str, Any]:
        """The complete recipe of a run, but for its folder."""
        experiment, models = self.experiment, self.models[replicate.world]
        tasks = world_plan(str(experiment.world_file)).tasks
        mix = [tasks[name].model_dump(mode="json", exclude_defaults=True) for name in experiment.tasks]
        base: dict[str, Any] = {
            "seed": replicate.seed,
            "model": {"path": str(models.model(arm.student or experiment.student).path)},
            "teachers": {
                "endpoints": list(self.addresses),
                "default": experiment.served[0],
                "routes": dict(experiment.routes),
            },
            "prompts": mix[0] if len(mix) == 1 else {"mix": mix},
        }
        recipe = merge(merge(base, flatten(experiment.recipe)), self._resolved(arm.overrides, replicate.world))
        recipe = merge(recipe, {"train.learning_rate": rate, "train.threads": 1})
        return recipe if self.form == "full" else merge(recipe, self._quick(recipe))

    def _quick(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """The overrides of the short form. Those of a method's key apply only if the first method has this key."""
        methods = recipe.get("methods", [])
        first = methods[0] if methods else {}
        return {
            key: value
            for key, value in self.experiment.quick.items()
            if not key.startswith("methods.0.") or key.split(".")[2] in first
        }

    def _resolved(self, overrides: Mapping[str, Any], world: int) -> dict[str, Any]:
        return {k: str(self.answers(world, m[1])) if (m := _match(v)) else v for k, v in overrides.items()}

    def run(self, arm: Arm, replicate: Replicate, rate: float) -> Run:
        """The run of an arm in a replicate with a learning rate."""
        name = f"seed-{replicate.seed}" if replicate != self.tuning_replicate else f"tune-{rate:g}"
        return Run(
            arm.name,
            replicate,
            self.world_folder(replicate.world) / arm.name / name,
            self.recipe(arm, replicate, rate),
            rate,
            root=self.root,
            world_key=self.models[replicate.world].world.key,
        )

    def default_rate(self) -> float:
        """The recipe's own learning rate."""
        return float(self.experiment.recipe["train"]["learning_rate"])

    def rates(self, arm: Arm) -> tuple[float, ...]:
        """Learning rates of an arm; a single one needs no sweep. The short form has two for the first arm, else one."""
        rates = arm.learning_rates or (float(arm.overrides.get("train.learning_rate", self.default_rate())),)
        return rates if self.form == "full" else rates[: 2 if arm is self.experiment.arms[0] else 1]

    def tuning(self, arm: Arm) -> list[Run]:
        """The runs of an arm's sweep of learning rates; empty if there is nothing to choose."""
        rates = self.rates(arm)
        if arm.same_rate_as is not None or len(rates) == 1:
            return []
        return [self.run(arm, self.tuning_replicate, rate) for rate in rates]


def _match(value: object) -> re.Match[str] | None:
    return _ANSWERS.fullmatch(value) if isinstance(value, str) else None
