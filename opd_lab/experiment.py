"""The declaration of an experiment: a base recipe, arms that override it, and claims that are judged on the results.

experiment   a question, a base recipe, a world, the models that are served, arms, premises, claims, a decision rule
replicate    a world seed and a run seed; arms are paired by it
arm          recipe overrides; optionally a learning-rate sweep and a mechanism that must be seen to act
premise      what a paper's method assumes of teacher and student, measured before any arm runs
claim        "arm X has less / more of a measure than arm Y", judged on paired replicates

All of this is in the experiment's file before an arm runs. Changes made after results were seen are listed there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from opd.errors import ConfigError

Measure = Literal[
    "accuracy",
    "greedy",
    "pass8",
    "pass64",
    "reverse_kl",
    "fall",
    "accuracy_at_tokens",
    "reverse_kl_at_tokens",
    "tokens_to",
    "steps_to",
    "flops_to",
]
OF_MODE = "mode/"
"""Prefix of measures that are figures of modes with the last weights, for example mode/accuracy/long."""
OF_DOMAIN = "domain/"
"""Prefix of measures that are the accuracy on a domain, sampled at temperature 1, for example domain/addition."""
OF_METRIC = "metric/"
"""Prefix of measures that are means of a training metric over the last quarter of the steps, like metric/reward."""
VALUE = "value:"
"""Prefix of a claim's rival that is a number, for example value:1.5."""
Direction = Literal["more", "less"]
TUNING_SEED = 990
"""Run seed of sweeps and of premises that train. From 1000 on, seeds give prompts that world 1's models trained on."""
ROUTED = "teachers"
"""Name among evaluated models that stands for the teacher of each prompt's own domain."""
WORLDS = Path(__file__).parent / "worlds"
RULE = (
    "A claim holds when the whole 95 % t interval over replicates is on its side and the mean of every world is too; "
    "it does not hold when both are on the other side; otherwise it is not shown. With a premise that is absent, a "
    "claim that does not hold or is not shown is not judged."
)
"""The decision rule of every experiment."""


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """A world and a run seed: the unit within which arms are paired.

    Attributes:
        world: seed of the world, which decides its models' weights, problems and noise.
        seed: seed of the run, which decides its prompts, rollouts and evaluations; differs from all seeds of worlds.
    """

    world: int
    seed: int

    @property
    def name(self) -> str:
        """The name in folders and files."""
        return f"w{self.world}-s{self.seed}"


@dataclass(frozen=True, slots=True)
class Fires:
    """Evidence that an arm's mechanism acted: in at least one step of every seed, `metric` `relation` `value` is true.

    Attributes:
        metric: key of metrics.jsonl.
        relation: the comparison.
        value: the number that the metric is compared with.
    """

    metric: str
    relation: Literal["<", ">"]
    value: float

    def seen(self, records: list[dict[str, Any]]) -> bool:
        """Whether the comparison is true in any record of metrics.jsonl."""
        values = [record[self.metric] for record in records if record.get(self.metric) is not None]
        return any(v < self.value if self.relation == "<" else v > self.value for v in values)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of training that an experiment compares.

    Attributes:
        name: name of the arm, and of its folder.
        title: description for the table of results.
        overrides: dotted recipe keys and their values.
        learning_rates: rates to sweep on the tuning seed; the best one is used for all seeds.
        same_rate_as: name of the arm whose chosen rate this one takes instead of its own sweep.
        student: the world's model that it starts from; the experiment's if empty.
        fires: evidence that its mechanism acted, without which the arm does not count.
    """

    name: str
    title: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    same_rate_as: str | None = None
    student: str = ""
    fires: tuple[Fires, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that `arm` has more, or less, of `measure` than `rival`.

    It is judged on paired replicates: by differences, or by ratios for costs.

    Attributes:
        text: the claim in words.
        arm: name of an arm.
        rival: name of another arm, "model:NAME" for an evaluated model, or a number like "value:1.5"; the latter two
            do not go with costs and the *_at_tokens forms.
        measure: the measured quantity.
            accuracy (8 answers to each held-out prompt at temperature 1), greedy, pass8, pass64, "domain/NAME" (the
            accuracy on a domain) and "mode/FIGURE" (see `student.data.mode_figures`) are measured on the final weights.
            "metric/NAME" is the mean of a training metric over the last quarter of the steps.
            reverse_kl is the mean of the last evaluations, and fall the deepest fall of the accuracy.
            The *_at_tokens forms are interpolated at the number of sampled tokens that both arms reached.
            tokens_to, steps_to and flops_to are costs until `level` is reached.
        direction: whether the arm is claimed to have more or less.
        level: for costs, the fraction of the rival's gain in accuracy that must be reached.
        factor: for costs, how many times cheaper the arm must be: a paper's figure, or 1 for cheaper at all.
        premise: name of the premise without which the claim is not judged, if any.
        share: for differences, the factor on the rival's measure before it is subtracted: 0.95 asks whether the arm
            keeps 95 % of it.
    """

    text: str
    arm: str
    rival: str
    measure: Measure | str
    direction: Direction = "more"
    level: float = 0.95
    factor: float = 1.0
    premise: str | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Premise:
    """An assumption of a method about teacher and student that can be measured without training with the method.

    Attributes:
        name: name by which claims refer to it.
        text: what must be true, in words.
        measure: dotted path "module:function" of a `function(plan, world, **options) -> Measured`.
        options: further arguments of the function.
    """

    name: str
    text: str
    measure: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question that is answered by training in worlds of tiny models.

    Attributes:
        name: name of the experiment, as in `opd lab run NAME`.
        letter: letter that orders the experiments in the results.
        title: title for readers.
        question: the question in words.
        tasks: the world's tasks, mixed in equal shares.
        world: name of a file in opd_lab/worlds, or the path of another world file.
        student: the world's model that is trained.
        recipe: base recipe; the lab adds seed, model, teachers and prompts, and for each run its folder.
        served: models of the world that the teacher server holds; the first is the default teacher.
        arms: the ways of training that are compared.
        claims: the claims that are judged.
        routes: mapping from domain to served model, for several teachers.
        evaluated: models whose accuracy on the same prompts is shown next to the arms.
        answers_of: model that writes the answers for arms that learn from a file, or "teachers" for the teacher of each
            prompt's domain. In overrides, `{answers:HOW}` stands for the path of the JSON-lines file; HOW is greedy,
            sampled, verified or best.
        worlds: seeds of the worlds, at least two.
        seeds: seeds of the runs in each world. They must differ from those of the worlds, whose prompts the models were
            trained on.
        premises: assumptions that are measured before any arm runs.
        decision: what is decided at which number of steps, written before the arms ran.
        changes: changes of the design, one line each, with date and reason.
        tune: measure by which learning rates are chosen.
        quick: overrides of the short form.
        note: what readers of the results must know.
    """

    name: str
    letter: str
    title: str
    question: str
    tasks: tuple[str, ...]
    recipe: Mapping[str, Any]
    served: tuple[str, ...]
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    routes: Mapping[str, str] = field(default_factory=dict)
    evaluated: tuple[str, ...] = ()
    world: str = "sums"
    student: str = "base"
    answers_of: str | None = None
    worlds: tuple[int, ...] = (0, 1)
    seeds: tuple[int, ...] = (10, 11, 12)
    premises: tuple[Premise, ...] = ()
    decision: str = ""
    changes: tuple[str, ...] = ()
    tune: Literal["accuracy", "reverse_kl"] = "accuracy"
    quick: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def replicates(self) -> tuple[Replicate, ...]:
        """All pairs of world and run seed: a run seed in every world, then the next one."""
        return tuple(Replicate(world, seed) for seed, world in product(self.seeds, self.worlds))

    @property
    def world_file(self) -> Path:
        """The path of the world file.

        Raises:
            ConfigError: when there is no such file.
        """
        for path in (WORLDS / f"{self.world}.yaml", Path(self.world)):
            if path.is_file():
                return path
        known = ", ".join(sorted(path.stem for path in WORLDS.glob("*.yaml")))
        raise ConfigError(f"experiment {self.name}: world {self.world!r} is neither a file nor one of {known}.")

    def arm(self, name: str) -> Arm:
        """The arm called `name`.

        Raises:
            ConfigError: when there is none.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ConfigError(
            f"experiment {self.name} has no arm {name!r}; it has {', '.join(arm.name for arm in self.arms)}."
        )
