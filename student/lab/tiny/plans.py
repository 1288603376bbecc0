"""The parts of a recipe: sizes, training stages, models and worlds."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from opd.tasks import TaskSettings
from student.rollout.episodes import EpisodeSettings

Progress = Callable[[str, int, int], None]
"""Called with (model's name, steps done, steps in all)."""

StepProgress = Callable[[int, int], None]
"""Called with (steps done, steps in all) of one stage."""


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
    """How a model is trained.

    Attributes:
        steps: optimizer steps.
        batch: rows per step.
        lr: peak learning rate of AdamW.
        warmup: steps of linear warm-up; afterwards the rate falls linearly to a tenth of the peak.
        noise: chance of each answer token to be replaced, in half of the rows; 0 turns it off.
        start: added to the seed of the training stream, so that two stages can see different rows.
        until: stop as soon as greedy decoding answers this share of 128 training prompts correctly, checked every 20
            steps; None trains all steps. It makes a student of a wanted level whatever the seed.
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
    """How a model is trained by reinforcement on its own answers.

    Attributes:
        steps: optimizer steps, each on fresh rollouts.
        prompts: prompts per step.
        samples: answers per prompt, at least 2.
        lr: learning rate of AdamW; rates that suit supervised training destroy the model here.
        warmup: steps of linear warm-up.
        max_new_tokens: answers are cut here; a rambling one holds up the whole batch.
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
    """One piece of training.

    Attributes:
        plan: how.
        tasks: names of the world's tasks, in equal shares.
    """

    plan: SftPlan | ReinforcePlan
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model.

    Attributes:
        shape: its size.
        stages: its training, in order; none leaves the weights random.
        parent: an earlier model of the world to start from, of the same shape, instead of random weights.
        shuffled: number token ids in another order, which makes the model unfit for the others.
    """

    shape: Shape
    stages: tuple[TrainingStage, ...] = ()
    parent: str | None = None
    shuffled: bool = False


@dataclass(frozen=True, slots=True)
class MergePlan(ModelPlan):
    """A model that is the mean of earlier ones of its shape.

    Attributes:
        merged: their names.
    """

    merged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """All of a world.

    Attributes:
        tasks: the tasks by name.
        models: the models by name, in order of building.
        max_new_tokens: enough for every correct answer.
        measured: held-out prompts per task on which each model's accuracy is measured.
        episodes: how prompts are played where all tasks are environments; models then learn the paths of their
            problems, and `max_new_tokens` bounds a whole episode.
    """

    tasks: Mapping[str, TaskSettings]
    models: Mapping[str, ModelPlan] = field(default_factory=dict)
    max_new_tokens: int = 32
    measured: int = 256
    episodes: EpisodeSettings | None = None


def model_seed(world: int, index: int) -> int:
    """The seed of the model at place `index` of a world: of its weights, and with `start` of its training prompts."""
    return world * 1000 + index


def training_seeds(plan: WorldPlan, worlds: Iterable[int]) -> Iterator[int]:
    """The seeds of the prompts that the models of worlds with these seeds are trained on."""
    for world in worlds:
        for index, model in enumerate(plan.models.values()):
            yield from (model_seed(world, index) + stage.plan.start for stage in model.stages)
