"""The plan of a world as dataclasses: shapes, training stages, models, and the world as a whole."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from opd.tasks import TaskSettings
from student.settings.episodes import EpisodeSettings

Progress = Callable[[str, int, int], None]
"""Called with (name of the model, steps done, total number of steps)."""

StepProgress = Callable[[int, int], None]
"""Called with (steps done, total number of steps) of one stage."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of a model.

    Attributes:
        hidden: width of the residual stream.
        layers: number of decoder layers.
        heads: query heads of width 32; half as many key-value heads.
        vocabulary: rows of the embedding; rows beyond the tokenizer's ids are padding and never trained.
        tied: whether the output head shares the embedding.
    """

    hidden: int
    layers: int
    heads: int = 4
    vocabulary: int = 260
    tied: bool = True


@dataclass(frozen=True, slots=True)
class SftPlan:
    """A stage of supervised training on worked solutions.

    Attributes:
        steps: optimizer steps.
        batch: rows per step.
        lr: peak learning rate of AdamW.
        warmup: steps of linear warm-up; afterwards the rate falls linearly to a tenth of the peak.
        noise: probability that an answer token is replaced, in half of the rows; 0 turns it off.
        start: added to the seed of the training stream, so that two stages can see different rows.
        until: stop as soon as greedy decoding answers this share of 128 training prompts correctly, checked every 20
            steps, so that the model has the same level with every seed; None trains all steps.
    """

    steps: int
    batch: int = 64
    lr: float = 5e-3
    warmup: int = 20
    noise: float = 0.0
    start: int = 0
    until: float | None = None


@dataclass(frozen=True, slots=True)
class ReinforcePlan:
    """A stage of reinforcement learning on the model's own answers.

    Attributes:
        steps: optimizer steps, each on fresh rollouts.
        prompts: prompts per step.
        samples: answers per prompt, at least 2.
        lr: learning rate of AdamW; rates that suit supervised training destroy the model here.
        warmup: steps of linear warm-up.
        max_new_tokens: maximum tokens of an answer; low, because one long answer holds up the whole batch.
        start: added to the seed of the training stream, so that two stages can see different prompts.
    """

    steps: int
    prompts: int = 32
    samples: int = 8
    lr: float = 1.5e-4
    warmup: int = 10
    max_new_tokens: int = 16
    start: int = 0


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """One stage of a model's training.

    Attributes:
        plan: how the model is trained.
        tasks: names of the world's tasks that it is trained on, in equal shares.
    """

    plan: SftPlan | ReinforcePlan
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The plan of one model.

    Attributes:
        shape: its size.
        stages: its training stages, in order; without any, it keeps the weights that it starts from.
        parent: name of an earlier model of the same shape to start from; None for random weights.
        shuffled: give its tokenizer other token ids, so that the model does not go with the others.
    """

    shape: Shape
    stages: tuple[TrainingStage, ...] = ()
    parent: str | None = None
    shuffled: bool = False


@dataclass(frozen=True, slots=True)
class MergePlan(ModelPlan):
    """The plan of a model that starts from the mean of earlier ones of its shape.

    Attributes:
        merged: names of these models.
    """

    merged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """The plan of a world.

    Attributes:
        tasks: the tasks by name.
        models: the models by name, in the order in which they are built.
        max_new_tokens: maximum tokens of an answer, enough for every correct one.
        measured: number of held-out prompts per task on which each model's accuracy is measured.
        episodes: how prompts are played if all tasks are environments; models then learn the paths that solve their
            problems, and `max_new_tokens` bounds a whole episode. None for other tasks.
    """

    tasks: Mapping[str, TaskSettings]
    models: Mapping[str, ModelPlan] = field(default_factory=dict)
    max_new_tokens: int = 32
    measured: int = 256
    episodes: EpisodeSettings | None = None


def model_seed(world: int, index: int) -> int:
    """The seed of the model at place `index` of a world. It decides the weights and, plus `start`, training prompts."""
    return world * 1000 + index


def training_seeds(plan: WorldPlan, worlds: Iterable[int]) -> Iterator[int]:
    """The seeds of all prompts that models are trained on, in the worlds of a plan with the given seeds."""
    for world in worlds:
        for index, model in enumerate(plan.models.values()):
            yield from (model_seed(world, index) + stage.plan.start for stage in model.stages)
