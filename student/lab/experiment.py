"""What an experiment declares: its recipe, its arms as overrides of it, and the claims that are checked on the results.

experiment   a question, a base recipe, a world, the models that are served, arms, premises, claims, a decision rule
replicate    a world seed and a run seed; arms are paired by it
arm          recipe overrides; optionally a learning-rate sweep and a mechanism that must be seen to act
premise      what a paper's method assumes of teacher and student, measured before any arm runs
claim        "arm X has less / more of a measure than arm Y", judged on paired replicates

All of it stands in the experiment's file before an arm runs; what was changed after results were seen is listed there.
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
"""Begins the measures that are figures of modes on the last weights, for example mode/accuracy/long."""
OF_DOMAIN = "domain/"
"""Begins the measures that are the accuracy on the prompts of a domain, sampled at temperature 1: domain/addition."""
OF_METRIC = "metric/"
"""Begins the measures that are metrics of training, means over the last quarter of the steps: metric/reward."""
VALUE = "value:"
"""Begins the rival of a claim that is a number, for example value:1.5."""
Direction = Literal["more", "less"]
TUNING_SEED = 990
"""Run seed of sweeps and of premises that train; the first model of world 1 was trained on the prompts of 1000."""
ROUTED = "teachers"
"""Among evaluated models: each prompt answered by the teacher of its domain."""
WORLDS = Path(__file__).parent / "worlds"
RULE = (
    "A claim holds when the whole 95 % t interval over replicates is on its side and the mean of every world is too; "
    "it does not hold when both are on the other side; otherwise it is not shown. With a premise that is absent, a "
    "claim that does not hold or is not shown is not judged."
)
"""The decision rule of every experiment."""


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """One world and one run in it: the unit over which arms are paired.

    Attributes:
        world: seed of the world: of its models' weights, problems and noise.
        seed: seed of the run: of its prompts, rollouts and evaluations; differs from every world's.
    """

    world: int
    seed: int

    @property
    def name(self) -> str:
        """As in folders and files."""
        return f"w{self.world}-s{self.seed}"


@dataclass(frozen=True, slots=True)
class Fires:
    """Evidence that an arm's mechanism acted: in some step of every seed, `metric` is `relation` `value`.

    Attributes:
        metric: key of metrics.jsonl.
        relation: how it must compare.
        value: with what.
    """

    metric: str
    relation: Literal["<", ">"]
    value: float

    def seen(self, records: list[dict[str, Any]]) -> bool:
        """Whether any record of metrics.jsonl shows it."""
        values = [record[self.metric] for record in records if record.get(self.metric) is not None]
        return any(v < self.value if self.relation == "<" else v > self.value for v in values)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train.

    Attributes:
        name: folder and row of the table.
        title: what it is, for the table.
        overrides: recipe keys (dotted) and their values.
        learning_rates: rates to sweep on the tuning seed; the best one is used for all seeds.
        same_rate_as: arm whose chosen rate this one takes, instead of a sweep of its own.
        student: the world's model that it begins with; the experiment's when empty.
        fires: what must be seen for the arm to count.
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
    """`arm` has `direction` of `measure` than `rival`: a difference, or for costs a ratio, of paired seeds.

    Attributes:
        text: the claim in words.
        arm, rival: names of arms; the rival may be an evaluated model, "model:NAME", or a number, "value:1.5" (for
            final measures only).
        measure: accuracy (8 answers to each held-out prompt at temperature 1), greedy, pass8 and pass64 are measured
            on the final weights, and so are the accuracy of a domain, "domain/...", and figures of modes, "mode/..."
            (`student.orbit.figures`); "metric/..." is the mean of a metric of training over the last quarter of the
            steps; reverse_kl is the mean of the last evaluations, fall the deepest fall of the accuracy; the
            *_at_tokens forms are read off at the number of sampled tokens that both arms reached; tokens_to, steps_to
            and flops_to are costs until `level` is reached.
        direction: what the claim says.
        level: fraction of the rival's final accuracy that counts as reached, for costs.
        factor: for costs, how many times cheaper the arm must be: a paper's figure, or 1 for cheaper at all.
        premise: name of the premise without which the claim is not judged, if any.
        share: for differences, what part of the rival's measure the arm is compared with: 0.95 asks whether it keeps
            95 % of it.
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
    """Something that a method assumes of teacher and student and that can be measured without training it.

    Attributes:
        name: as claims refer to it.
        text: what must be true, in words.
        measure: dotted path "module:function" of `function(plan, world, **options) -> Measured`.
        options: its further arguments.
    """

    name: str
    text: str
    measure: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question put to the tiny world.

    Attributes:
        name: as in `opd lab run NAME`.
        letter: place in the list of results.
        title, question: for people.
        tasks: the world's tasks, mixed in equal shares.
        world: name of a file in student/lab/worlds, or the path of one's own.
        student: the world's model that is trained.
        recipe: base recipe; the lab adds run, seed, model, teachers.endpoints and prompts.
        served: models of the world that the teacher server holds.
        arms: what is compared.
        claims: what is checked.
        routes: domain to served model, for several teachers.
        evaluated: models whose accuracy on the same prompts is shown beside the arms.
        answers_of: model, or "teachers" for each prompt's own, that writes the answers of `{answers:HOW}` (a JSON-lines
            file; HOW is greedy, sampled, verified or best) for arms that learn from them.
        worlds: seeds of the worlds, two at least.
        seeds: of the runs in each world; disjoint from the worlds', whose prompts the models were trained on.
        premises: measured before any arm runs.
        decision: what is decided at which number of steps, written before the arms ran.
        changes: of the design, one line each, which says when and why.
        tune: measure by which learning rates are chosen.
        quick: overrides of the short form.
        note: what a reader must know.
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
        """All pairs of world and run seed, a run seed in every world before the next one."""
        return tuple(Replicate(world, seed) for seed, world in product(self.seeds, self.worlds))

    @property
    def world_file(self) -> Path:
        """The file that describes the world.

        Raises:
            ConfigError: when no file has that name.
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
