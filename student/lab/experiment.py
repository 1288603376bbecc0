"""What an experiment declares: its recipe, its arms as overrides of it, and the claims that are checked on the results.

experiment   a question, a base recipe, the models that are served, arms, claims
arm          recipe overrides; optionally a learning-rate sweep and a mechanism that must be seen to act
claim        "arm X has less / more of a measure than arm Y", judged on paired seeds
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opd.errors import ConfigError

Measure = Literal[
    "accuracy",
    "greedy",
    "reverse_kl",
    "accuracy_at_tokens",
    "reverse_kl_at_tokens",
    "tokens_to",
    "steps_to",
    "flops_to",
]
Direction = Literal["more", "less"]
TUNING_SEED = 1000
ROUTED = "teachers"
"""Among evaluated models: each prompt answered by the teacher of its domain."""


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
        fires: what must be seen for the arm to count.
    """

    name: str
    title: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    same_rate_as: str | None = None
    fires: tuple[Fires, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """`arm` has `direction` of `measure` than `rival`: a difference, or for costs a ratio, of paired seeds.

    Attributes:
        text: the claim in words.
        arm, rival: names of arms, or of evaluated models as "model:NAME" (for final measures only).
        measure: accuracy and reverse_kl are means of the last evaluations; greedy is the greedy accuracy at the end;
            the *_at_tokens forms are read off at the number of sampled tokens that both arms reached; tokens_to,
            steps_to and flops_to are costs until `level` is reached.
        direction: what the claim says.
        level: fraction of the rival's final accuracy that counts as reached, for costs.
        factor: for costs, how many times cheaper the arm must be: a paper's figure, or 1 for cheaper at all.
    """

    text: str
    arm: str
    rival: str
    measure: Measure
    direction: Direction
    level: float = 0.95
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question put to the tiny world.

    Attributes:
        name: as in `opd lab run NAME`.
        letter: place in the list of results.
        title, question: for people.
        tasks: the world's tasks, mixed in equal shares.
        recipe: base recipe; the lab adds run, seed, model, teachers.endpoints and prompts.
        served: models of the world that the teacher server holds.
        arms: what is compared.
        claims: what is checked.
        routes: domain to served model, for several teachers.
        evaluated: models whose accuracy on the same prompts is shown beside the arms.
        answers_of: model that writes the answers of `{answers}` (a JSON-lines file) for arms that learn from them.
        seeds: of the runs.
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
    answers_of: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    tune: Literal["accuracy", "reverse_kl"] = "accuracy"
    quick: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

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
