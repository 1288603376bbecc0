"""What is said at the start of a run whose parts go together, but may not do what is expected."""

from __future__ import annotations

from collections.abc import Iterator

from student.data.prompt_facts import never_again
from student.job.rules import Parts, Rule, advantages_of, chain_of, named, not_stale


def remarks(parts: Parts) -> list[str]:
    """The remarks of the parts themselves and of all rules."""
    own = [remark for part in parts.all for remark in part.remarks(parts.recipe, parts.terms)]
    return own + [sentence for rule in REMARKS for sentence in rule(parts)]


def _stale_updates(p: Parts) -> Iterator[str]:
    updates = p.recipe.train.epochs * p.recipe.train.minibatches
    for term in p.terms if updates > 1 else ():
        chain, name = chain_of(term), term.settings.name
        if chain is None and (why := not_stale(term)):
            yield (
                f"of the {updates} updates per batch, all but the first learn from rows of older weights, with which "
                f"term {name!r} does not work: {why}; or make one update"
            )
        without = getattr(term.settings, "ratio", "") == "none"
        if chain is not None and without and not (chain.traits.off_policy or term.traits.recomputes):
            yield (
                f"term {name!r} has ratio none, so of {updates} updates per batch all but the first treat rows of "
                "older weights as on policy; set ratio: token, or make one update"
            )


def _of_responses(p: Parts) -> Iterator[str]:
    for term in p.terms:
        chain, ratio = chain_of(term), getattr(term.settings, "ratio", "")
        if chain and chain.traits.of_response and (ratio != "none" or term.settings.aggregation != "constant"):
            yield (
                f"advantage {chain.first.settings.name!r} is the derivative of a loss in the log-prob of whole "
                f"responses, which term {term.settings.name!r} with ratio {ratio} and aggregation "
                f"{term.settings.aggregation} changes; set ratio: none and aggregation: constant"
            )


def _idle_bounds(p: Parts) -> Iterator[str]:
    train = p.recipe.train
    for term in p.terms:
        bounds = [name for name in getattr(term, "bounds", ()) if getattr(term.settings, name, None) is not None]
        if not bounds or getattr(term.settings, "loss", None):
            continue
        if getattr(term.settings, "ratio", "") == "none":
            # A loss whose bound is `ratio` has no bound to set, but its weight is made of the ratio.
            names = " and ".join(name if name != "ratio" else "the weight by the ratio" for name in bounds)
            yield f"{names} of term {term.settings.name!r} can never act, because ratio none has no ratio"
            continue
        # A ratio to the policy that sampled is 1 only for what this very student sampled, by the same numerics.
        others = p.engine.traits.holds_weights or (term.settings.rows != "sampled" and p.givers)
        moved = train.max_staleness or train.epochs * train.minibatches > 1
        if not moved and not (getattr(term.settings, "ratio_to", "") == "behaviour" and others):
            yield (
                f"{' and '.join(bounds)} of term {term.settings.name!r} can never act, because with one update per "
                "batch every importance ratio is 1; set train.minibatches or train.epochs to make several updates"
            )


def _no_mismatch(p: Parts) -> Iterator[str]:
    others = any(part.traits.gives_log_probs for part in p.givers)
    for part in p.all:
        alike = not p.engine.traits.holds_weights and not p.recipe.train.max_staleness and not others
        if part.traits.wants_mismatch and alike:
            yield (
                f"{named(part)} never acts, because engine {p.engine.settings.name} samples with the same weights and "
                "numerics that score; it is meant for other engines, hints, replay and train.max_staleness"
            )
        if part.traits.wants_given_rows and not p.givers:
            yield (
                f"{named(part)} finds no hinted or given rows to learn from, because neither rollout.strategy nor "
                "methods give any, so it is the loss on sampled rows alone"
            )


def _dropped_groups(p: Parts) -> Iterator[str]:
    for term in p.terms if p.strategy.traits.drops_equal_groups else ():
        if term.traits.learns_from_equal:
            yield (
                f"{named(p.strategy)} drops the groups whose rewards are all equal, although advantage "
                f"{advantages_of(term)[0].settings.name!r} learns from them"
            )


def _cut_answers(p: Parts) -> Iterator[str]:
    learning = [term.settings for term in p.terms if term.needs().reward]
    leaving = [settings for settings in learning if getattr(settings, "skip_truncated", False)]
    for reward in p.rewards.parts if learning and len(leaving) == len(learning) else ():
        if what := reward.traits.rewards_cut:
            yield (
                f"{named(reward)} {what}, but term {leaving[0].name!r} leaves them out (skip_truncated); set "
                "skip_truncated: false, or remove what would reward them"
            )


def _late(p: Parts) -> Iterator[str]:
    for part in (*p.all, *p.advantages):
        if part.traits.remembers_prompts and never_again(p.recipe):
            fix = part.traits.why.get("remembers_prompts", "")
            yield (
                f"{named(part)} acts by the history of each prompt, but a procedural task hardly ever gives one twice"
                f"{fix and '; ' + fix}"
            )
        for what, step in part.traits.begins.items():
            if step >= p.recipe.train.steps:
                yield (
                    f"{what} of {named(part)} begins with step {step}, which is never reached: the run has "
                    f"{p.recipe.train.steps} (train.steps)"
                )


def _uncertain(p: Parts) -> Iterator[str]:
    how = {"abstract": "built from the abstract of its paper", "inferred": "inferred from what others say of its paper"}
    for part in (*p.all, *p.advantages):
        if grade := how.get(part.evidence):
            yield f"the formula of {part.settings.name} is {grade}, so results may differ from the paper's"


def _other_temperatures(p: Parts) -> Iterator[str]:
    sampled_at = p.recipe.rollout.temperature
    for term in p.terms:
        signals = [need for need in term.needs().signals if need.temperature is not None]
        pairs = {(need.role, need.temperature or 0.0, need.student_temperature or sampled_at) for need in signals}
        for role, temperature, own in sorted(pairs):
            if temperature != own:
                yield (
                    f"{term.settings.name} compares the student at temperature {own:g} with the {role} at temperature "
                    f"{temperature:g}, so it learns that difference too; rollout.temperature is {sampled_at:g}."
                )


def _rounded(p: Parts) -> Iterator[str]:
    """A warning if trained weights have low precision; adapters are float32 over any base."""
    recipe = p.recipe
    if recipe.model.dtype != "float32" and recipe.model.lora is None:
        yield (
            f"model.dtype {recipe.model.dtype} rounds the trained weights after every update, which loses most of the "
            f"update at small learning rates (train.learning_rate {recipe.train.learning_rate:g}); set it to float32, "
            "with train.mixed_precision: bf16 for speed, or train adapters (model.lora)."
        )


def _noisy(p: Parts) -> Iterator[str]:
    """What dropout while learning does to ratios and losses."""
    if p.recipe.model.dropout:
        yield (
            "model.dropout is true: where the model's config has dropout or router noise, the student learns another "
            "distribution than it samples from, so that importance ratios of fresh tokens are not 1; the metrics "
            "mismatch/* show by how much, and rollout.engine.mismatch_limit counts it as well."
        )


REMARKS: tuple[Rule, ...] = (
    _stale_updates,
    _of_responses,
    _idle_bounds,
    _no_mismatch,
    _dropped_groups,
    _cut_answers,
    _late,
    _uncertain,
    _other_temperatures,
    _rounded,
    _noisy,
)
