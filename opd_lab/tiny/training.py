"""Runs a training stage of a world as an ordinary student job, and measures models with the student's own rollouts."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from opd.console import Console
from opd.errors import CancelledError
from opd.tasks import MixSettings, PromptSource, TaskSettings
from opd_lab.tiny.plans import ReinforcePlan, SftPlan, StepProgress
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row
from student.job.evaluate import Answer, report
from student.job.session import train
from student.model.model import load_student, load_tokenizer
from student.report.shown import Figures
from student.report.telemetry import Telemetry
from student.rollout.engine import EngineSetup, RolloutEngineSettings, TransformersRollout
from student.rollout.episodes import EpisodePlayer
from student.rollout.policy_sampler import sample_or_play
from student.rollout.requests import RolloutSpec
from student.settings.episodes import EpisodeSettings
from student.settings.recipe import Recipe

_BATCH = 256


def recipe_of(
    plan: SftPlan | ReinforcePlan,
    tasks: Sequence[TaskSettings],
    *,
    model: Path,
    run: Path,
    seed: int,
    longest: int,
    episodes: EpisodeSettings | None = None,
) -> Recipe:
    """Make the recipe of a stage's job.

    Args:
        plan: how to train.
        tasks: tasks to train on, in equal shares.
        model: folder of the initial weights.
        run: run folder.
        seed: seed that, plus `plan.start`, decides prompts and rollouts.
        longest: maximum tokens of an answer in supervised training, enough for every correct one.
        episodes: how prompts are played if the tasks are environments; None otherwise.
    """
    prompts = tasks[0] if len(tasks) == 1 else MixSettings(mix=[*tasks])
    source = "solution" if episodes is None else "path"
    parts = _supervised(plan, longest, source) if isinstance(plan, SftPlan) else _reinforced(plan)
    played = {} if episodes is None else {"episodes": episodes.model_dump(mode="json")}
    train_group = {
        "steps": plan.steps,
        "learning_rate": plan.lr,
        "warmup_steps": min(plan.warmup, plan.steps),
        "betas": (0.9, 0.98),
        "threads": 1,
    }
    return Recipe.model_validate(
        {
            "run": run,
            "seed": seed + plan.start,
            "model": {"path": str(model)},
            "prompts": prompts.model_dump(mode="json"),
            "objective": parts["objective"],
            "methods": parts.get("methods", []),
            "rollout": parts["rollout"] | played,
            "train": train_group | parts.get("train", {}),
            "eval": {"prompts": 0},
            "samples": {"every": 0, "count": 0},
        }
    )


def _supervised(plan: SftPlan, longest: int, source: str) -> Mapping[str, Any]:
    methods: list[dict[str, Any]] = [{"name": "expert_rows", "share": 1.0, "source": source}]
    if plan.noise:
        # With its seed 0 in every world: errors also depend on the prompt and so on the world, and another seed would
        # change the weights of all worlds in the results of the lab.
        methods.append({"name": "opd_lab.tiny.methods:Noise", "share": plan.noise})
    if plan.until is not None:
        methods.append({"name": "opd_lab.tiny.methods:Until", "accuracy": plan.until})
    return {
        "objective": [{"name": "sft", "aggregation": "token_mean"}],
        "methods": methods,
        "rollout": {"prompts_per_step": plan.batch, "batch_rows": _BATCH, "max_new_tokens": longest},
        "train": {"schedule": "linear", "final_fraction": 0.1, "weight_decay": 0.01},
    }


def _reinforced(plan: ReinforcePlan) -> Mapping[str, Any]:
    return {
        # The mean over the tokens of the step, and not over the length limit, lets one rate suit tasks of any length.
        "objective": [{"name": "rloo", "aggregation": "token_mean"}],
        "rollout": {
            "prompts_per_step": plan.prompts,
            "samples_per_prompt": plan.samples,
            "max_new_tokens": plan.max_new_tokens,
            "batch_rows": _BATCH,
        },
    }


def train_stage(recipe: Recipe, progress: StepProgress) -> Path:
    """Run the job of a stage from the beginning and return the folder of the trained model, in the run folder.

    Raises:
        CancelledError: after Ctrl-C or SIGTERM. The next build starts the present model again.
    """
    shutil.rmtree(recipe.run, ignore_errors=True)
    sinks = _Steps(recipe.train.steps, progress)
    try:
        summary = train(recipe, telemetry=sinks)
    except CancelledError as error:
        raise CancelledError(
            "the build was stopped; run the command again to continue with the model that was being built."
        ) from error
    progress(recipe.train.steps, recipe.train.steps)
    return Path(summary["checkpoint"]) / "model"


class _Steps(Telemetry):
    """Telemetry that only reports progress.

    Args:
        total: number of steps of the stage.
        progress: called after each step.
    """

    def __init__(self, total: int, progress: StepProgress) -> None:
        super().__init__(None, total, 0, Console(quiet=True))
        self._tell = progress

    def start(self, done: int, shown: Figures) -> None:
        """Do nothing."""

    def step(self, step: int, metrics: Mapping[str, float], stages: Mapping[str, float]) -> None:
        """Report that `step` steps are done."""
        self._tell(step, self._total)


class Examiner:
    """Measures a model on held-out prompts with the student's own rollouts; prompts of environments are played.

    Args:
        model: folder of the model.
        longest: maximum tokens of an answer or episode.
        seed: seed of sampled answers.
        episodes: how prompts of environments are played; None for the defaults.
    """

    def __init__(self, model: Path, *, longest: int, seed: int, episodes: EpisodeSettings | None = None) -> None:
        self.tokenizer = load_tokenizer(str(model))
        self.student = load_student(str(model), dtype="float32", attention=None, gradient_checkpointing=False)
        limit = self.tokenizer.model_max_length
        self._longest = longest
        spec = RolloutSpec(seed, _BATCH, candidates=0, valid_vocab=len(self.tokenizer), max_prompt_tokens=limit)
        self._engine = TransformersRollout(RolloutEngineSettings(name="transformers"))
        self._engine.open(EngineSetup(self.student.lm, self.tokenizer, spec, str(model)))
        self._player = EpisodePlayer(episodes or EpisodeSettings(), self.tokenizer, spec)

    def accuracy(self, source: PromptSource, count: int, temperatures: Sequence[float]) -> list[float]:
        """Accuracy on the first `count` held-out prompts at each of `temperatures`; 0 is greedy.

        Answers of all temperatures are sampled together. Prompts with an unknown verdict are left out.
        """
        prompts = source.prompts("heldout", count)
        plans = [
            plan_step(0, prompts, samples=1, max_new_tokens=1, temperature=temperature).rows
            for temperature in temperatures
        ]
        rows = self.play([row for rows in plans for row in rows])
        for row in rows:
            if row.verdict is None:  # episodes have the verdict of their environment already
                row.verdict = source.verify(row.prompt, row.text)
        answers = [Answer.of(row, place) for place, row in enumerate(rows)]
        return [report(answers[start : start + count], 1, None).accuracy for start in range(0, len(answers), count)]

    def play(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """Sample the planned answers and episodes, each with at most `longest` tokens; the same rows at every call."""
        rows = [replace(row, max_new_tokens=self._longest) for row in planned]
        return sample_or_play(self._engine, self._player, rows, purpose=("eval", "world"))

    def close(self) -> None:
        """Close the environments."""
        self._player.close()
