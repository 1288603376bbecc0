"""What a plug-in states of itself, so that recipes in which it could not work are refused before they run.

`student.job.rules` says which traits do not go together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from opd.errors import PluginError, short

Scope: TypeAlias = Literal["", "batch", "group"]
"""Rewards that can be shifted or scaled together without effect: the whole step's, or those of any one group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """The traits of a plug-in under its settings; the defaults claim nothing. A kind ignores traits of other kinds.

    Attributes:
        why: for the trait that it names, a clause on the reason and the way out, in place of the rule's own.
        works_ahead: whether it works with `train.max_staleness`. A method must plan a step before the earlier steps are
            observed, and remember nothing from `plan` to the other hooks of the step except what `state_dict` saves.
            The first round of a strategy must ask for exactly the planned rows of this rank, which were sampled ahead.
        works_with_summaries: whether a method or strategy works if students summarise episodes (history: summary).
        least_group: answers to a prompt without which it could do nothing.
        reads: what it makes its numbers of besides rewards: "behaviour", the log-probs of the policy that sampled,
            which given answers lack, or what another part gives.
        gives: what another part must read for it to have an effect: "values" (a critic's), "turns" and "token_rewards"
            (rewards by turn and by token), or a name of its own.
        columns: columns of the prompts that it cannot do without.
        tags: tags that it puts on all rows of a prompt, by which advantages may then form groups, each with the column
            without which a prompt does not get it; "" if every prompt does.
        remembers_prompts: whether it acts only on prompts that recur.
        begins: parts of it that begin late, each with its step.
        shown: the metrics of a term that step lines, `opd watch` and the report show first, with their labels on a step
            line; "loss" is the term's own loss. Metrics that the step does not have are left out.
        learns_from_stale_rows: whether a term can learn from rows sampled with older weights. It can if its loss, given
            the prefix, does not depend on which policy drew the token, or is weighted by the importance ratio
            p(y) / behaviour(y), capped or not.
        learns_from_given_rows: whether a term can learn from rows that the student did not sample.
        wants_given_rows: whether a term differs from another one only on such rows.
        sums_teachers: whether losses against several teachers may be summed with weights, which is meaningful for
            divergences.
        ranks_tokens: whether a token's weight depends on the other tokens of its response, so that the loss of a
            truncated response is not the loss of the same tokens within the whole.
        recomputes: whether signals of role "student", and the credit of an advantage, are recomputed before every
            update of a step but the first; credit then group by group.
        gives_rows: values of a term's setting `rows` under which it learns from rows that a method or strategy adds and
            that the student did not sample under the prompt that they train; empty if it adds none.
        gives_log_probs: whether those rows have log-probs under a policy, for the ratio to that policy.
        gives_scored: which terms may need scores: "all"; "given", all that do not learn from those rows, which have
            no scores; or "none".
        gives_stale_rows: whether those rows are of older weights.
        wants_mismatch: whether it acts only on rows that were sampled with other weights or numerics than they are
            scored with.
        judges_first: whether a strategy calls `Sampling.judge`, so that models do not score rows as soon as they are
            sampled.
        drops_equal_groups: whether a strategy drops groups whose rewards are all equal.
        cuts_responses: whether a method cuts responses, whose loss must then be a part of the whole one's.
        learns_from_equal: whether groups whose rewards all agree get credit.
        shift_free: over which binary rewards adding a constant changes no credit, so that a reward that is constant
            there has no effect; "" for none.
        scale_free: the same for multiplying by a positive factor, up to an epsilon.
        sees_threshold: whether `shift_free` and `scale_free` hold only while every reward stays on its side of a
            threshold. Moving the rewards of a group across it does have an effect.
        within: the least and the largest reward that an advantage accepts; None for any.
        off_policy: whether an advantage is made for rows of an older policy without a ratio.
        of_response: whether it is minus the derivative of a loss in the log-prob of a whole response. With ratio none
            and aggregation constant the gradient is then that of this loss.
        rewards_cut: what a reward gives to answers that the length limit cut; "" if no more than to others.
        holds_weights: whether an engine samples from weights of its own, which `sync` replaces, instead of the trained
            model itself. If so, it also samples ahead (`train.max_staleness`); if not, one on a copy of the student
            does.
        on_device: whether an engine samples in memory of the student's device.
        takes_shards: whether `sync` and `pack` of an engine gather the weights of a sharded student themselves; other
            engines get whole tensors. To sample a sharded student ahead, such an engine needs `pack`.
        records_moe_routes: whether an engine fills `Row.moe_routes` if `RolloutSpec.moe_routes` is set.
        shared: whether all ranks sample from one copy of an engine's weights. When sampling ahead, no rank may then
            replace it before all ranks have their rows.
    """

    why: Mapping[str, str] = field(default_factory=dict)
    works_ahead: bool = False
    works_with_summaries: bool = True
    least_group: int = 1
    reads: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    remembers_prompts: bool = False
    begins: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=lambda: {"loss": "loss"})
    learns_from_stale_rows: bool = False
    learns_from_given_rows: bool = True
    wants_given_rows: bool = False
    sums_teachers: bool = False
    ranks_tokens: bool = False
    recomputes: bool = False
    gives_rows: tuple[Literal["all", "expert"], ...] = ()
    gives_log_probs: bool = False
    gives_scored: Literal["all", "given", "none"] = "all"
    gives_stale_rows: bool = False
    wants_mismatch: bool = False
    judges_first: bool = False
    drops_equal_groups: bool = False
    cuts_responses: bool = False
    learns_from_equal: bool = False
    shift_free: Scope = ""
    scale_free: Scope = ""
    sees_threshold: bool = False
    within: tuple[float, float] | None = None
    off_policy: bool = False
    of_response: bool = False
    rewards_cut: str = ""
    holds_weights: bool = False
    on_device: bool = True
    takes_shards: bool = False
    records_moe_routes: bool = False
    shared: bool = False


FORMER = {
    "hooks": "a method `around`",
    "admits": "the method `admits` of its settings",
    "strata": "the method `strata_of` of its settings",
    "packs": "a method `pack`",
    "wait_for": "`EngineSetup.space`",
    "why_not_stale": "Traits(learns_from_stale_rows=...) of a term, Traits(works_ahead=...) of others",
    "against_summaries": "Traits(works_with_summaries=...)",
    "takes_given": "Traits(learns_from_given_rows=...)",
    "gives_answers": "Traits(gives_rows=...)",
    "judges": "Traits(judges_first=...)",
    "reads_behaviour": 'Traits(reads=("behaviour",))',
    "reads_values": 'Traits(reads=("values",))',
    "turns_for": 'Traits(gives=("turns",))',
    "records_experts": "Traits(records_moe_routes=...)",
}
"""Members that plug-ins had before they stated traits, each with what is read today."""
UNREAD = FORMER | {trait.name: f"Traits({trait.name}=...) in `traits`" for trait in fields(Traits)}
"""Members of a class that nothing reads, although their names say that something would."""


def check_members(cls: type) -> None:
    """Refuse a plug-in's class that states something where it is not read.

    Raises:
        PluginError: naming the first such member, and its present name.
    """
    for name in (name for name in vars(cls) if name in UNREAD):
        raise PluginError(f"{cls.__module__}.{cls.__name__}.{name} is not read; write {UNREAD[name]} instead.")


def traits_of(part: object, found: object) -> Traits:
    """What the `traits` of a plug-in are.

    Raises:
        PluginError: if they are anything but `Traits`.
    """
    if not isinstance(found, Traits):
        raise PluginError(
            f"the traits of {type(part).__name__} are {short(found)}; they must be a student.plugin.traits.Traits."
        )
    return found
