"""The recipe: all settings of `opd train`, in groups. Each key is documented here and nowhere else."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from opd.config import Settings
from opd.tasks.modes import ModeSettings
from opd.tasks.settings import PromptSettings
from student.settings.contexts import ContextSettings
from student.settings.evaluation import EvalSettings, SampleSettings
from student.settings.model import ModelSettings
from student.settings.rollout import RolloutSettings
from student.settings.teachers import TeacherSettings
from student.settings.trackers import TrackerSettings
from student.settings.train import TrainSettings


class Recipe(Settings):
    """All settings of a student job."""

    run: Path = Field(description="Run folder. It must not exist yet, unless the run is resumed.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything random: prompts, rollouts and evaluation.")
    model: ModelSettings = Field(description="The model that is trained.")
    teachers: TeacherSettings | None = Field(None, description="The served models; may be omitted in plain RL.")
    prompts: PromptSettings = Field(description="Prompts for training and evaluation.")
    modes: dict[str, ModeSettings] = Field(
        default_factory=dict,
        description="Modes in which prompts are asked (ORBIT), by name. Each has a mark for its prompts, a budget in "
        "tokens and a teacher.",
    )
    contexts: dict[str, ContextSettings] = Field(
        default_factory=dict,
        description="What a model reads before a response instead of the student's prompt (hints, solutions, its own "
        "system prompt), by role (teacher, reference) or by teacher name. The student never sees it.",
    )
    rollout: RolloutSettings = Field(
        default_factory=RolloutSettings, description="How the student's responses are sampled."
    )
    objective: list[dict[str, Any]] = Field(
        default_factory=lambda: [{"name": "opd"}],
        min_length=1,
        examples=["[{name: opd}]"],
        description="Terms of the objective, which are added up, each with its name and settings; see `opd plugins "
        "list objective`.",
    )
    rewards: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Rewards in addition to the verifier's verdict, each with its name and settings. One of them may "
        "replace the verdict; the others are added to it. See `opd plugins list reward`.",
    )
    methods: list[dict[str, Any]] = Field(
        default_factory=list,
        examples=["[{name: adwin}]"],
        description="Methods that control the loop (windows, curricula, jumps), each with its name and settings; see "
        "`opd plugins list method`.",
    )
    train: TrainSettings = Field(
        default_factory=TrainSettings, description="The optimizer, its schedule and checkpoints."
    )
    eval: EvalSettings = Field(default_factory=EvalSettings, description="Evaluation on held-out prompts.")
    samples: SampleSettings = Field(default_factory=SampleSettings, description="Which answers go to samples.jsonl.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the student's Prometheus metrics; 0 turns them off."
    )
    metrics_host: str = Field(
        "127.0.0.1", description="Address on which these metrics are served, unencrypted and without authentication."
    )
    trackers: list[TrackerSettings] = Field(
        default_factory=list,
        examples=["[{name: tensorboard}]"],
        description="Experiment trackers that also receive metrics, answers and the report (extra trackers). If one "
        "fails, it is dropped and the run continues.",
    )
    tracing: bool = Field(
        False, description="Export OpenTelemetry spans of every step (extra otel; set by OTEL_* variables)."
    )

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if self.train.warmup_steps > self.train.steps:
            raise ValueError(
                f"train.warmup_steps ({self.train.warmup_steps}) is over train.steps ({self.train.steps}); lower it"
            )
        if self.train.minibatches > self.rollout.prompts_per_step:
            raise ValueError(
                f"train.minibatches ({self.train.minibatches}) is over rollout.prompts_per_step "
                f"({self.rollout.prompts_per_step}), but a minibatch holds whole groups of answers; lower it"
            )
        return self
