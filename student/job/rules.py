"""Which parts of a recipe do not go together, by the traits that they state (`student.plugin.traits`), and why.

Each rule yields sentences, the first of which ends the run before anything is loaded; `student.job.remarks` has the
rules whose sentences are only logged. What one plug-in alone can know stands in its own `check` and `remarks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opd.errors import ConfigError, PluginError
from student.data.prompt_facts import keeps
from student.plugin.base import Plugin
from student.plugin.controllers import Controller
from student.plugin.strategy import Strategy
from student.plugin.terms import Term
from student.plugin.traits import traits_of
from student.rl.advantages.base import Advantage, GroupEstimator, Modifier
from student.rl.advantages.chain import AdvantageChain
from student.rollout.engine import RolloutEngine
from student.scoring.rewards.base import Reward
from student.scoring.rewards.chain import RewardChain
from student.settings.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Parts:
    """A recipe and the plug-ins that it names."""

    recipe: Recipe
    terms: Sequence[Term]
    controllers: Sequence[Controller]
    strategy: Strategy
    rewards: RewardChain
    engine: RolloutEngine

    @property
    def all(self) -> list[Plugin[Any]]:
        """All plug-ins but advantages and the engine."""
        return [*self.terms, *self.steering, *self.rewards.parts]

    @property
    def steering(self) -> list[Controller | Strategy]:
        """The methods and the strategy."""
        return [*self.controllers, self.strategy]

    @property
    def advantages(self) -> list[Advantage]:
        """The advantages of all terms."""
        return [part for term in self.terms for part in advantages_of(term)]

    @property
    def givers(self) -> list[Controller | Strategy]:
        """The methods, and the strategy, that add rows which the student did not sample."""
        return [part for part in self.steering if part.traits.gives_rows]


Rule: TypeAlias = Callable[[Parts], Iterator[str]]


def chain_of(term: Term) -> AdvantageChain | None:
    """The advantages of a term that learns by credit; None of another one."""
    chain: AdvantageChain | None = getattr(term, "chain", None)
    return chain


def advantages_of(term: Term) -> list[Advantage]:
    """The advantages of a term, the estimator first."""
    chain = chain_of(term)
    return [] if chain is None else chain.parts


def named(part: Plugin[Any]) -> str:
    """The kind and the name of a part, as messages write them."""
    kinds = {Term: "term", Advantage: "advantage", Reward: "reward", Controller: "method", Strategy: "rollout.strategy"}
    kind = next(kind for cls, kind in kinds.items() if isinstance(part, cls))
    quoted = isinstance(part, Term | Advantage | Reward)
    return f"{kind} {str(part.settings.name)!r}" if quoted else f"{kind} {part.settings.name}"


def refuse(parts: Parts) -> None:
    """Refuse parts that do not go together.

    Raises:
        ConfigError: naming them, and what to change.
        PluginError: for traits of another type, or a hook that every part of its kind must have.
    """
    for part in (*parts.advantages, *parts.all):
        traits_of(part, part.traits)
        _check_hooks(part)
    for rule in REFUSALS:
        for sentence in rule(parts):
            raise ConfigError(sentence)


_REQUIRED: tuple[tuple[type[Plugin[Any]], str], ...] = (
    (Term, "token_losses"),
    (Strategy, "run"),
    (Reward, "reward"),
    (Advantage, "estimate"),
)
"""The hook that a plug-in of a kind cannot do without."""


def _check_hooks(part: Plugin[Any]) -> None:
    missing = [hook for base, hook in _REQUIRED if isinstance(part, base) and inherits(part, base, hook)]
    for base, hook in ((GroupEstimator, "of_group"), (Modifier, "modify")):  # called by their `estimate`
        if isinstance(part, base) and inherits(part, base, "estimate") and inherits(part, base, hook):
            missing.append(hook)
    if missing:
        raise PluginError(f"{named(part)} does not implement {missing[0]}; add it to class {type(part).__name__}.")


def inherits(part: Plugin[Any], base: type[Plugin[Any]], hook: str) -> bool:
    """Whether the class of `part` leaves a hook as `base` has it."""
    return getattr(type(part), hook) is getattr(base, hook)


def _twice(p: Parts) -> Iterator[str]:
    kinds = [type(controller) for controller in p.controllers]
    for controller in p.controllers:
        if kinds.count(type(controller)) > 1:  # both would write the same metrics, notes and tags
            yield f"method {controller.settings.name!r} is named twice; keep one of them."


def _several_teachers(p: Parts) -> Iterator[str]:
    if p.recipe.teachers is None or not p.recipe.teachers.sums_divergences:
        return
    for part in (*p.terms, *p.steering):
        if not part.traits.sums_teachers and part.needs().teacher:
            yield (
                f"{part.settings.name} cannot learn from several teachers of one row with teachers.combine: "
                "divergence; set it to probability, or route each prompt to one teacher."
            )


def _without_log_probs(p: Parts) -> Iterator[str]:
    giver = next((part for part in p.givers if not part.traits.gives_log_probs), None)
    for term in p.terms:
        if giver is None or term.settings.rows == "sampled":
            continue
        what = [named(part) for part in advantages_of(term) if "behaviour" in part.traits.reads]
        what += ["its importance ratio"] if "behaviour" in term.traits.reads else []
        if what:
            yield (
                f"term {term.settings.name!r} has rows: {term.settings.rows} and would learn from the given answers "
                f"of {named(giver)}, which have no log-probs under a policy that sampled them, while {what[0]} needs "
                "these; set rows: sampled, or use objective rl_plus, or ratio: none with another advantage."
            )


def _given_rows(p: Parts) -> Iterator[str]:
    for term in p.terms:
        if p.givers and term.settings.rows != "sampled" and not term.traits.learns_from_given_rows:
            payload = getattr(term.settings, "payload", None)
            what = "estimates from the sampled token" if payload is None else f"has payload {payload}"
            other = "" if payload is None else ", or use payload gather or hidden"
            yield (
                f"term {term.settings.name!r} {what}, which needs rows that the student sampled, but "
                f"{named(p.givers[0])} adds others; set its rows to sampled{other}."
            )
        if not p.givers and term.settings.rows == "expert":
            yield (
                f"term {term.settings.name!r} learns from given rows only, and nothing gives any; add method "
                "expert_rows, or let the plug-in that gives them say so in its traits (gives_rows)."
            )
    for part in p.givers:
        if all(term.settings.rows not in part.traits.gives_rows for term in p.terms):
            fix = part.traits.why.get("gives_rows", "add term sft")
            yield f"no term learns from the rows that {named(part)} adds; {fix}."
        for term in p.terms:
            learns = term.settings.rows != "sampled"
            unscored = part.traits.gives_scored == "none" or (part.traits.gives_scored == "given" and learns)
            if unscored and term.needs().signals:
                yield (
                    f"term {term.settings.name!r} needs scores, which the rows that {named(part)} adds do not have; "
                    "use term sft for those, and set the term's rows to sampled or remove it."
                )
            if part.traits.gives_stale_rows and term.settings.rows == "all" and (why := not_stale(term)):
                yield (
                    f"{named(part)} replays rows of older weights, with which term {term.settings.name!r} does not "
                    f"work: {why}, or rows: sampled."
                )


def _own_weights(p: Parts) -> Iterator[str]:
    for term in p.terms:  # nothing would average their gradients
        if p.recipe.train.sharding != "none" and type(term).module is not Term.module:
            yield (
                f"term {term.settings.name!r} trains weights of its own, which cannot be sharded; set train.sharding: "
                "none."
            )


def _small_groups(p: Parts) -> Iterator[str]:
    samples = p.recipe.rollout.samples_per_prompt
    for part in p.all:
        least = part.traits.least_group
        if samples < least:
            why = part.traits.why.get("least_group", "compares the answers to a prompt")
            yield (
                f"{named(part)} {why}, but rollout.samples_per_prompt is {samples}, so it would learn nothing; set "
                f"rollout.samples_per_prompt to {least} or more, for example 8."
            )


def _cut_responses(p: Parts) -> Iterator[str]:
    """The loss of a cut response must be a partial sum of the loss of the whole response."""
    for part in p.controllers:
        for term in p.terms if part.traits.cuts_responses else ():
            cuts, label, settings = f"{named(part)} cuts responses, but term", term.settings.name, term.settings
            if settings.aggregation != "constant":
                yield (
                    f"{named(part)} needs aggregation constant, but term {label!r} has {settings.aggregation}, with "
                    "which the gradient of a window is not a part of the whole; set the term's aggregation to constant."
                )
            if term.needs().reward:
                yield f"{cuts} {label!r} needs the reward of whole responses; remove one of them."
            if term.traits.ranks_tokens:
                yield f"{cuts} {label!r} ranks the tokens of the whole response; remove one of them."
            if getattr(settings, "discount", 0.0):
                yield f"{cuts} {label!r} depends on what follows a token; set discount: 0."


_SOURCES = {
    "values": ("the values of a critic", "use objective ppo, or advantage gae", "add critic to methods"),
    "turns": ("rewards by turn", "", ""),
    "token_rewards": ("rewards by token", "use advantage gae with method critic", ""),
}
"""What parts give and read: in words, what to use to read it, and what to add for a reader that needs it."""


def _unread(p: Parts) -> Iterator[str]:
    read = {source for part in (*p.terms, *p.advantages) for source in part.traits.reads}
    given = {source for part in p.all for source in part.traits.gives}
    for part in p.all:
        for source in part.traits.gives:
            what, use, _ = _SOURCES.get(source, (source.replace("_", " "), "", ""))
            if source not in read:
                use = part.traits.why.get("gives", use)
                yield (
                    f"no term or advantage reads {what}, which {named(part)} gives, so it would change nothing; {use}."
                )
    for reader in (*p.terms, *p.advantages):
        for source in reader.traits.reads:
            what, _, add = _SOURCES.get(source, (source.replace("_", " "), "", ""))
            add = reader.traits.why.get("reads", add)
            if add and source not in given and source != "behaviour":
                yield f"{named(reader)} needs {what}, which nothing gives; {add}."


def _columns(p: Parts) -> Iterator[str]:
    for part in (*p.all, *p.advantages):
        for column in part.traits.columns:
            if not keeps(p.recipe, column):
                yield (
                    f"{named(part)} reads column {column!r}, which is not kept with the prompts, so it would do "
                    "nothing; add it to prompts.keep_columns."
                )


def _reward_range(p: Parts) -> Iterator[str]:
    rewards = p.rewards.parts
    bounds = [found for reward in rewards if (found := reward.bounds()) is not None]
    if not bounds or len(bounds) < len(rewards):
        return
    # If no reward replaces the verdict, its value from 0 to 1 is added.
    low, high = sum(low for low, _ in bounds), sum(high for _, high in bounds) + (p.rewards.whole is None)
    for part in p.advantages:
        within = part.traits.within
        if within is not None and not within[0] <= low <= high <= within[1]:
            names = " and ".join(repr(reward.label) for reward in rewards)
            yield (
                f"advantage {part.settings.name!r} takes rewards from {within[0]:g} to {within[1]:g}, but with "
                f"{names} they range from {low:g} to {high:g}; set its lowest and highest to these."
            )


def _summaries(p: Parts) -> Iterator[str]:
    for part in p.steering if p.recipe.rollout.episodes.summarised else ():
        if not part.traits.works_with_summaries:
            why = part.traits.why.get("works_with_summaries", "it does not state that it can")
            yield (
                f"rollout.episodes.history is summary, but {part.settings.name} does not work with it: {why}; or set "
                "history to a number of turns, or to null."
            )


def not_stale(part: Plugin[Any]) -> str:
    """Why a part cannot work with rows of older weights, a clause; "" if it can."""
    trait = "learns_from_stale_rows" if isinstance(part, Term) else "works_ahead"
    kinds = {
        Term: "it takes sampled tokens for the current student's own, and has no importance weight",
        Controller: "it does not state that it can plan a step before the earlier steps are observed",
        Strategy: "it does not state that its first round is exactly the plan",
    }
    usual = next(why for cls, why in kinds.items() if isinstance(part, cls))
    return "" if getattr(part.traits, trait) else part.traits.why.get(trait, usual)


def _staleness(p: Parts) -> Iterator[str]:
    steps, engine = p.recipe.train.max_staleness, p.engine
    if not steps:
        return
    # Only the loop's thread may use collectives; with two threads, ranks could pair them wrongly.
    if p.recipe.train.sharding != "none" and engine.traits.takes_shards and type(engine).pack is RolloutEngine.pack:
        yield (
            f"train.max_staleness is {steps}, but rollout.engine {engine.settings.name} gathers the weights of a "
            "sharded student from all ranks at once, which it cannot do while the student learns; set "
            "train.max_staleness: 0, rollout.engine to {name: transformers} or servers, or train.sharding: none."
        )
    for part in (*p.terms, *p.steering):
        if why := not_stale(part):
            yield (
                f"train.max_staleness is {steps}, but {part.settings.name} does not work with it: {why}; or set "
                "train.max_staleness: 0."
            )
    giving = next((part.settings.name for part in p.controllers if part.traits.gives_rows), None)
    if engine.traits.holds_weights and giving is not None:
        yield (
            f"rollout.engine {engine.settings.name} has weights of its own and leaves the given answers of {giving} "
            "to the student itself, which learns while train.max_staleness samples; set train.max_staleness: 0, or "
            "rollout.engine to {name: transformers}."
        )


REFUSALS: tuple[Rule, ...] = (
    _twice,
    _several_teachers,
    _without_log_probs,
    _given_rows,
    _own_weights,
    _small_groups,
    _cut_responses,
    _unread,
    _columns,
    _reward_range,
    _summaries,
    _staleness,
)
