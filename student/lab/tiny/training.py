"""A stage of a world as a student job: the loop that trains and measures tiny models is the student's own."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.errors import CancelledError
from opd.tasks import MixSettings, PromptSource, TaskSettings
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row
from student.evaluate import Answer, report
from student.lab.tiny.plans import ReinforcePlan, SftPlan, StepProgress
from student.learning.model import load_student, load_tokenizer
from student.loop import train
from student.recipe import Recipe
from student.rollout.engine import EngineSetup, RolloutEngineSettings, TransformersRollout, sample_or_play
from student.rollout.episodes import EpisodePlayer, EpisodeSettings
from student.rollout.spec import RolloutSpec
from student.run.telemetry import Telemetry

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
    """The job of a stage.

    Args:
        plan: how to train.
        tasks: what to train on, in equal shares.
        model: folder of the weights to begin with.
        run: run folder.
        seed: decides prompts, rollouts and noise, together with `plan.start`.
        longest: tokens enough for every correct answer.
        episodes: how they are played, where the tasks are environments.
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
        methods.append({"name": "student.lab.tiny.methods:Noise", "share": plan.noise})
    if plan.until is not None:
        methods.append({"name": "student.lab.tiny.methods:Until", "accuracy": plan.until})
    return {
        "objective": [{"name": "sft", "aggregation": "token_mean"}],
        "methods": methods,
        "rollout": {"prompts_per_step": plan.batch, "batch_rows": _BATCH, "max_new_tokens": longest},
        "train": {"schedule": "linear", "final_fraction": 0.1, "weight_decay": 0.01},
    }


def _reinforced(plan: ReinforcePlan) -> Mapping[str, Any]:
    return {
        # Divided by the tokens of the step instead of the length limit, so that one rate suits tasks of any length.
        "objective": [{"name": "rloo", "aggregation": "token_mean"}],
        "rollout": {
            "prompts_per_step": plan.prompts,
            "samples_per_prompt": plan.samples,
            "max_new_tokens": plan.max_new_tokens,
            "batch_rows": _BATCH,
        },
    }


def train_stage(recipe: Recipe, progress: StepProgress) -> Path:
    """Run the job of a stage; returns the folder of the trained model, in the run folder.

    Raises:
        CancelledError: after Ctrl-C or SIGTERM; a build goes on with the model that it stopped in.
    """
    shutil.rmtree(recipe.run, ignore_errors=True)
    sinks = _Steps(recipe.train.steps, progress)
    try:
        summary = train(recipe, telemetry=sinks)
    except CancelledError as error:
        raise CancelledError("the build was stopped; build again to go on with the model it was at.") from error
    progress(recipe.train.steps, recipe.train.steps)
    return Path(summary["checkpoint"]) / "model"


class _Steps(Telemetry):
    """Tells the steps of a stage and writes nothing.

    Args:
        total: steps of the stage.
        progress: called after each.
    """

    def __init__(self, total: int, progress: StepProgress) -> None:
        super().__init__(None, total, 0, Console(quiet=True))
        self._tell = progress

    def start(self, done: int) -> None:
        """Show nothing."""

    def step(self, step: int, metrics: Mapping[str, float], stages: Mapping[str, float]) -> None:
        """Tell that `step` steps are done."""
        self._tell(step, self._total)


class Examiner:
    """Measures a model on held-out prompts, by the student's own rollouts; those of environments are played.

    Args:
        model: its folder.
        longest: tokens enough for every correct answer.
        seed: of sampled answers.
        episodes: how prompts of environments are played.
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
        """Share of the first `count` held-out prompts that are answered correctly at each of `temperatures`.

        Answers of all temperatures are sampled together. Unknown verdicts do not count.
        """
        prompts = source.prompts("heldout", count)
        plans = [
            plan_step(0, prompts, samples=1, max_new_tokens=1, temperature=temperature).rows
            for temperature in temperatures
        ]
        rows = self.play([row for rows in plans for row in rows])
        for row in rows:
            if row.verdict is None:  # an episode has that of its environment
                row.verdict = source.verify(row.prompt, row.text)
        answers = [Answer.of(row, place) for place, row in enumerate(rows)]
        return [report(answers[start : start + count], 1, None).accuracy for start in range(0, len(answers), count)]

    def play(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """The model's answers and episodes, each up to the longest; the same every time."""
        rows = [replace(row, max_new_tokens=self._longest) for row in planned]
        return sample_or_play(self._engine, self._player, rows, purpose=("eval", "world"))

    def close(self) -> None:
        """End the environments."""
        self._player.close()
