"""Declarations of what terms and other plug-ins need, from which the loop derives rollouts, requests and statistics."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from opd.errors import ConfigError, PluginError
from opd.wire.types import PayloadKind, PayloadSpec

TEACHER = "teacher"
REFERENCE = "reference"
STUDENT = "student"
INITIAL = "initial"
EMA = "ema"
LOCAL_MODELS = (STUDENT, INITIAL, EMA)
"""Models in this process: the student's current weights, those of step 0, and their moving average."""
ROLES = (TEACHER, REFERENCE, *LOCAL_MODELS)

_STRENGTHS = ("", "any", "verdict")


def teacher_role(name: str) -> str:
    """The role under which a row keeps the signals of one of several teachers whose divergences are summed."""
    return f"{TEACHER}/{name}"


# What a term may ask of the student's distribution at the trained positions: log-probs of the response token and at
# the student's candidates, log-probs at the teacher's top-k ids, or hidden states with the head.
SCORES = "scores"
SCORES_AT_TEACHER = "scores_at_teacher"
HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class SignalNeed:
    """A payload that is needed from a role.

    Attributes:
        role: "teacher" (routed per prompt), "reference" (one model for all rows), or a model in this process: "student"
            (its weights at the time of scoring: the old policy), "initial" or "ema".
        spec: the payload; gather is at the student's candidates.
        temperature: divides the model's logits; None for that of the student's distribution in the loss.
        student_temperature: divides the student's logits where the two are compared; None for that of the rollouts.
        spans: whether the term reads spans of text (`SignalTokens.span`), which a teacher with another tokenizer can
            give too.
    """

    role: str
    spec: PayloadSpec
    temperature: float | None = None
    student_temperature: float | None = None
    spans: bool = False

    @property
    def level(self) -> float:
        """The temperature to ask for; 1 if `merge` was not given the temperature of the rollouts."""
        return 1.0 if self.temperature is None else self.temperature


@dataclass(frozen=True, slots=True)
class Needs:
    """What a term needs to compute its loss.

    Attributes:
        signals: payloads of models, served or in this process.
        candidates: K, the number of the student's most likely ids per position to keep at rollout; 0 for none.
        reward: "verdict" if each row must be verified, "any" if it needs a reward from any source, else "".
        student: views of the student's distribution, a subset of {"scores", "scores_at_teacher", "hidden"}.
        models: a subset of {"student", "initial", "ema"}, kept for plug-ins that read them through the services.
        moe_routes: whether the rollout must record the experts that each token is routed to (`Row.moe_routes`).
    """

    signals: tuple[SignalNeed, ...] = ()
    candidates: int = 0
    reward: Literal["", "any", "verdict"] = ""
    student: frozenset[str] = field(default_factory=frozenset)
    models: frozenset[str] = field(default_factory=frozenset)
    moe_routes: bool = False

    @property
    def served(self) -> bool:
        """Whether any payload comes from a model that the recipe's `teachers` group names."""
        return any(need.role in (TEACHER, REFERENCE) for need in self.signals)

    @property
    def local(self) -> frozenset[str]:
        """Models in this process that are used by their own names."""
        return self.models | {need.role for need in self.signals if need.role in LOCAL_MODELS}

    @property
    def teacher(self) -> bool:
        """Whether any payload comes from a teacher, so that every prompt needs one."""
        return any(need.role == TEACHER for need in self.signals)

    def describe(self) -> str:
        """The payloads with their sources, and the rewards, in words."""
        payloads = [
            f"{need.spec.kind}" + (f"({need.spec.k})" if need.spec.k else "") + f" from the {need.role}"
            for need in self.signals
        ]
        return (", ".join(payloads) or "no teacher") + ("; rewards" if self.reward else "")


def needs_of(part: Any) -> Needs:
    """What a plug-in needs.

    Raises:
        PluginError: if its `needs` returns anything but `Needs`.
    """
    needs = part.needs()
    if not isinstance(needs, Needs):
        raise PluginError(f"{type(part).__name__}.needs returned {needs!r}; it must return a student.data.needs.Needs.")
    return needs


def merge(needs: Iterable[Needs], *, temperature: float | None = None) -> Needs:
    """The smallest needs that satisfy all of `needs`.

    For each role and payload kind the largest k is taken; `sampled` is dropped if top-k or gather already carry it.

    Args:
        needs: the needs of terms, controllers and other plug-ins.
        temperature: the temperature of the rollouts, for signals without one.

    Raises:
        ConfigError: for a role that does not exist, for two temperatures from one role, or for top-k from two roles.
    """
    every = list(needs)
    single = [signal for need in every for signal in need.signals]
    temperatures, widest = _temperatures(single, temperature), _widest(single)
    # A row has one set of candidates for all roles, as large as the largest need.
    gathered = [spec.k for (_, kind), spec in widest.items() if kind is PayloadKind.GATHER]
    candidates = max([need.candidates for need in every] + gathered, default=0)
    signals = tuple(
        SignalNeed(
            role,
            PayloadSpec.gather(candidates, spec.value_dtype) if kind is PayloadKind.GATHER else spec,
            1.0 if kind is PayloadKind.HIDDEN else temperatures[role],
            spans=all(signal.spans for signal in single if signal.role == role),
        )
        for (role, kind), spec in sorted(widest.items(), key=lambda entry: entry[0])
    )
    return Needs(
        signals=signals,
        candidates=candidates,
        reward=max((need.reward for need in every), key=_STRENGTHS.index, default=""),
        student=frozenset().union(*(need.student for need in every)),
        models=frozenset().union(*(need.models for need in every)),
        moe_routes=any(need.moe_routes for need in every),
    )


def _temperatures(signals: Iterable[SignalNeed], default: float | None) -> dict[str, float | None]:
    """The temperature of each role's log-probs.

    Raises:
        ConfigError: for a role that does not exist, or for two temperatures from one role.
    """
    temperatures: dict[str, float | None] = {}
    for signal in signals:
        if signal.role not in ROLES:
            raise ConfigError(
                f"a term needs signals of role {signal.role!r}, which does not exist; the roles are {', '.join(ROLES)}."
            )
        if signal.spec.kind is PayloadKind.HIDDEN:
            continue  # the temperature divides logits; hidden states come before them
        temperature = default if signal.temperature is None else signal.temperature
        first = temperatures.setdefault(signal.role, temperature)
        if first != temperature:
            raise ConfigError(
                f"two terms need the {signal.role} at temperatures {first} and {temperature}; set teacher_temperature "
                "to the same value in both, or remove it."
            )
    return temperatures


def _widest(signals: Iterable[SignalNeed]) -> dict[tuple[str, PayloadKind], PayloadSpec]:
    """The payload with the largest k for each role and kind, without those that another one carries.

    Raises:
        ConfigError: for top-k from two roles.
    """
    widest: dict[tuple[str, PayloadKind], PayloadSpec] = {}
    for signal in signals:
        key = (signal.role, signal.spec.kind)
        if key not in widest or signal.spec.k > widest[key].k:
            widest[key] = signal.spec
    # Both bring the log-prob of the sampled token as well.
    for role, kind in list(widest):
        carried = any((role, rich) in widest for rich in (PayloadKind.TOPK, PayloadKind.GATHER))
        if kind is PayloadKind.SAMPLED and carried:
            del widest[role, kind]
    lists = sorted(role for role, kind in widest if kind is PayloadKind.TOPK)
    if len(lists) > 1:
        raise ConfigError(
            f"payload topk is needed from {' and '.join(lists)}, but the student can be compared at the top ids of "
            "one model only; use payload gather or hidden for one of them."
        )
    return widest
