"""The handshake: before the first step, checks that every served model fits the student, or refuses the run.

It checks tokenizer, vocabulary, payloads, temperature and limits, and has each served model score a test row twice.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.errors import ConfigError, IncompatibleTeacherError, TeacherNotFoundError
from opd.fleet.same_tokens import unlike_tokens
from opd.fleet.source import ScoreSource
from opd.tasks.environments.base import ENVIRONMENT
from opd.tasks.source import PromptSource
from opd.wire.bounds import MAX_TEMPERATURE, MIN_TEMPERATURE
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from student.data.needs import EMA, LOCAL_MODELS, REFERENCE, TEACHER, Needs
from student.plugin.terms import build_terms
from student.scoring.contexts import reads_outcomes
from student.scoring.requests import build_router, destination
from student.scoring.stops import teacher_stops
from student.scoring.translate import Translator, translator_of
from student.settings.recipe import Recipe
from student.settings.teachers import TeacherSettings

_KINDS = {
    PayloadKind.SAMPLED: pb.PAYLOAD_KIND_SAMPLED,
    PayloadKind.TOPK: pb.PAYLOAD_KIND_TOPK,
    PayloadKind.GATHER: pb.PAYLOAD_KIND_GATHER,
    PayloadKind.HIDDEN: pb.PAYLOAD_KIND_HIDDEN,
    PayloadKind.FULL: pb.PAYLOAD_KIND_FULL,
}
_MIXABLE = {PayloadKind.SAMPLED, PayloadKind.GATHER}
_ROUTED_PROMPTS = 1000


@dataclass(frozen=True, slots=True)
class RunModels:
    """The models of a run.

    Attributes:
        infos: served models by name, as they describe themselves, for the run folder.
        local: names of the models that run in this process.
        translators: translate rows for served models that have another tokenizer, by name.
    """

    infos: dict[str, pb.TeacherInfo]
    local: frozenset[str]
    translators: dict[str, Translator] = field(default_factory=dict)

    @property
    def alike(self) -> dict[str, pb.TeacherInfo]:
        """The served models to which the student's ids mean what they mean to the student."""
        return {name: info for name, info in self.infos.items() if name not in self.translators}


def named_roles(settings: TeacherSettings, served: Sequence[str], needs: Needs) -> dict[str, set[str]]:
    """The roles of every model that the recipe names as a teacher or reference, by name.

    Raises:
        TeacherNotFoundError: if the recipe names a model that is neither served nor in this process.
        ConfigError: if an objective needs a reference but the recipe names none, or if teachers are mixed with a
            payload that does not determine the mixture.
    """
    roles: dict[str, set[str]] = {}
    wanted = {need.role for need in needs.signals}
    if TEACHER in wanted:
        targets = [target for target in (settings.default, *settings.routes.values()) if target is not None]
        kinds = {need.spec.kind for need in needs.signals if need.role == TEACHER}
        # Top-k ids differ between teachers, and hidden states come before the softmax, so the log-probs of the mixture
        # cannot be computed from either.
        if settings.several and settings.combine == "probability" and kinds - _MIXABLE:
            raise ConfigError(
                f"several teachers on one row can be mixed with payload sampled or gather, not {', '.join(kinds)}; "
                "change the payload, set teachers.combine to divergence or route each prompt to one teacher."
            )
        for name in (name for target in targets for name in ([target] if isinstance(target, str) else target)):
            roles.setdefault(name, set()).add(TEACHER)
    if REFERENCE in wanted:
        if settings.reference is None:
            raise ConfigError(
                "the objective needs a reference; set teachers.reference to a served model, or to initial for the "
                "student's first weights."
            )
        roles.setdefault(settings.reference, set()).add(REFERENCE)
    for name in roles:
        if name not in served and name not in LOCAL_MODELS:
            raise TeacherNotFoundError(
                f"the recipe names teacher {name!r}, but the fleet serves {', '.join(served) or 'nothing'} (in "
                f"process: {', '.join(LOCAL_MODELS)}); correct the name, or serve that teacher."
            )
    return roles


def shake_hands(
    fleet: ScoreSource | None,
    recipe: Recipe,
    needs: Needs,
    tokenizer: PreTrainedTokenizerBase,
    source: PromptSource,
    stops: Collection[int],
) -> RunModels:
    """Route the prompts and check every served model that the run will use; `stops` end the student's responses.

    Raises:
        IncompatibleTeacherError: if a served model does not fit; the message names both sides.
        ConfigError: for a prompt without a teacher, or a context of a model that is not used.
    """
    settings = recipe.teachers
    local = set(needs.local)
    if settings is not None and settings.ema.served is not None:
        local.add(EMA)
    roles: dict[str, set[str]] = {name: {name} for name in local}
    infos: dict[str, pb.TeacherInfo] = {}
    translators: dict[str, Translator] = {}
    if settings is not None:
        served = sorted(fleet.teachers()) if fleet is not None else []
        named = named_roles(settings, served, needs)
        if needs.teacher:
            for name in routed_teachers(settings, served, source, recipe.eval.prompts):
                named.setdefault(name, set()).add(TEACHER)
        local |= named.keys() - set(served)  # a served model takes precedence over a local one of the same name
        _check_served_average(recipe, named.keys() & set(served))
        for name in sorted(named.keys() & set(served)):
            assert fleet is not None  # it serves `name`
            info = infos[name] = fleet.describe(name)
            if unlike := unlike_tokens(fleet, info, tokenizer):
                _check_spans(recipe, needs, named[name], unlike)
                dense = any(need.spec.kind is PayloadKind.TOPK for need in needs.signals)
                translators[name] = translator_of(fleet, info, tokenizer, stops, dense=dense)
            _check(fleet, recipe, needs, tokenizer, info, named[name], translated=name in translators)
        if translators and any(ENVIRONMENT in prompt.extra for prompt in source.prompts("train", 1)):
            raise IncompatibleTeacherError(
                f"teacher {min(translators)!r} has another tokenizer, with which episodes are not scored; use a "
                "teacher of the student's family for them."
            )
        for name, wanted in named.items():
            roles[name] = roles.get(name, set()) | wanted
    _check_contexts(recipe, roles)
    return RunModels(infos, frozenset(local), translators)


def _check(
    fleet: ScoreSource,
    recipe: Recipe,
    needs: Needs,
    tokenizer: PreTrainedTokenizerBase,
    info: pb.TeacherInfo,
    roles: set[str],
    *,
    translated: bool,
) -> None:
    """Check a served model; `translated` if it reads rows in tokens of its own."""
    assert recipe.teachers is not None  # it names the model
    if not translated:
        _check_vocabulary(info, recipe, needs, roles, tokenizer)
        _check_lengths(info, recipe, roles)
    _check_needs(info, needs, roles)
    # Recorded scores are not computed, so they cannot disagree with themselves.
    if not fleet.recorded:
        _check_self_agreement(fleet, info, recipe.teachers.fleet.health.agreement_nats)


def _check_spans(recipe: Recipe, needs: Needs, roles: set[str], unlike: str) -> None:
    """Refuse a model with another tokenizer unless all that reads it reads spans of text.

    Raises:
        IncompatibleTeacherError: naming what reads single tokens.
    """
    assert recipe.teachers is not None
    if any(not need.spans for need in needs.signals if need.role in roles):
        terms = build_terms(recipe.objective)
        names = [
            term.settings.name for term in terms if any(n.role in roles and not n.spans for n in term.needs().signals)
        ]
        raise IncompatibleTeacherError(
            f"{unlike}; {' and '.join(names) or 'a plug-in of the recipe'} needs ids that mean the same. Use a teacher "
            "of the student's family, compare spans of text (objective span_opd), or learn from the teacher's own "
            "answers (opd answers, then objective sft with method expert_rows)."
        )
    if recipe.teachers.several and recipe.teachers.combine == "probability":
        raise IncompatibleTeacherError(
            f"{unlike}, so their probabilities cannot be mixed token by token; set teachers.combine to divergence, or "
            "route each prompt to one teacher."
        )
    late = [role for role, one in recipe.contexts.items() if reads_outcomes(role, one)]
    if late:
        raise IncompatibleTeacherError(
            f"{unlike}, and contexts.{late[0]} is made from outcomes, which is not done for such teachers; make it "
            "from columns of the prompt alone."
        )


def _check_contexts(recipe: Recipe, roles: Mapping[str, set[str]]) -> None:
    """Refuse a context that no model reads.

    Raises:
        ConfigError: naming it.
    """
    readers = {*roles, *(role for wanted in roles.values() for role in wanted)}
    for name in recipe.contexts:
        if name not in readers:
            raise ConfigError(
                f"contexts.{name} has no effect, because this run reads from "
                f"{', '.join(sorted(readers)) or 'no model'}; remove it or correct the name."
            )


def _check_served_average(recipe: Recipe, asked: set[str]) -> None:
    """Refuse a served average that is never used, or that a step could mix with the previous one.

    Raises:
        ConfigError: naming what to change.
    """
    ema = recipe.teachers.ema if recipe.teachers is not None else None
    if ema is None or ema.served is None:
        return
    if ema.served not in asked:
        raise ConfigError(
            f"teachers.ema.served is {ema.served!r}, but the run uses "
            f"{', '.join(sorted(asked)) or 'no served model'}; name it in teachers.default or teachers.routes, or "
            "remove teachers.ema.served."
        )
    if recipe.train.max_staleness:
        raise ConfigError(
            f"teachers.ema.served changes teacher {ema.served!r} between two steps, but with train.max_staleness "
            f"{recipe.train.max_staleness} rows of later steps are scored at the same time; set train.max_staleness "
            "to 0."
        )


def routed_teachers(settings: TeacherSettings, served: Sequence[str], source: PromptSource, heldout: int) -> list[str]:
    """The teachers that prompts are routed to; a prompt without a route stops the run before its first step.

    Every pair (teacher, domain) that a prompt can have is routed. If the source does not know its pairs, the first
    training prompts and the `heldout` prompts of evaluations are routed instead. A later prompt without a teacher, or
    with a teacher that none of these uses, then stops the run with its state saved.

    Raises:
        ConfigError: naming the pair or the prompt.
    """
    router = build_router(settings, served)
    labels = source.labels()
    if labels is not None:
        found = [router.route({"teacher": teacher, "domain": domain}) for teacher, domain in sorted(labels, key=str)]
    else:
        prompts = [*source.prompts("train", _ROUTED_PROMPTS), *source.prompts("heldout", heldout)]
        found = [destination(router, prompt) for prompt in prompts]
    return sorted({name for target in found for name, _ in target.parts})


def _check_vocabulary(
    info: pb.TeacherInfo, recipe: Recipe, needs: Needs, roles: Collection[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a teacher that lacks ids of the student, or whose further ids would come up in what is asked of it.

    Probability of further ids is part of the tail of a gather, and is left out with their rows of a head.
    """
    size, who = len(tokenizer), f"teacher {info.name!r}"
    if info.vocab_size < size:
        raise IncompatibleTeacherError(
            f"{who} has {info.vocab_size} vocabulary rows, fewer than the {size} ids of the tokenizer of student "
            f"{tokenizer.name_or_path!r}; use another teacher."
        )
    if info.vocab_size == size:
        return
    kinds = {need.spec.kind for need in needs.signals if need.role in roles}
    if kinds & {PayloadKind.TOPK, PayloadKind.FULL}:
        raise IncompatibleTeacherError(
            f"{who} has {info.vocab_size - size} ids more than the {size} of the student's tokenizer, which its "
            "likeliest tokens may be; use payload gather, hidden or sampled."
        )
    mapped = recipe.teachers is not None and recipe.teachers.map_stops
    foreign = sorted(token for token in teacher_stops(info) if token >= size)
    if mapped and foreign:
        raise IncompatibleTeacherError(
            f"{who} ends responses with id {foreign[0]}, which the student's tokenizer of {size} ids lacks, so that "
            "teachers.map_stops cannot map it; set map_stops to false, or add the token to the student's tokenizer."
        )


def longest_prompt(recipe: Recipe, model: str, roles: Collection[str]) -> tuple[int, str]:
    """The maximum number of tokens that a model reads before a response, and the setting that determines it.

    Args:
        recipe: gives the limits of prompts and contexts.
        model: name of the model.
        roles: the model's roles, each of which may read a different prompt.
    """
    usual = (recipe.rollout.max_prompt_tokens, "rollout.max_prompt_tokens")
    found = []
    for role in sorted(roles):
        # A teacher's own context takes precedence over that of role teacher; without either it reads the prompt.
        key = model if role == TEACHER and model in recipe.contexts else role
        own = recipe.contexts[key].max_tokens if key in recipe.contexts else None
        found.append(usual if own is None else (own, f"contexts.{key}.max_tokens"))
    return max(found, default=usual)


def too_long(recipe: Recipe, longest: int, name: str, who: str, most: int) -> str:
    """The beginning of an error message.

    Args:
        recipe: the job.
        longest: number of tokens that a row may have.
        name: the setting of the longest prompt.
        who: the model that takes fewer.
        most: number of tokens that it takes.
    """
    within = ", within rollout.episodes.summary.context_tokens" if recipe.rollout.episodes.summarised else ""
    return (
        f"rollouts may have {longest} tokens ({name} + rollout.max_new_tokens{within}), but {who} takes at most "
        f"{most}; lower them"
    )


def _check_lengths(info: pb.TeacherInfo, recipe: Recipe, roles: set[str]) -> None:
    prompt, name = longest_prompt(recipe, info.name, roles)
    longest = recipe.rollout.longest_sequence(prompt)
    if longest > info.limits.max_sequence_tokens:
        said = too_long(recipe, longest, name, f"teacher {info.name!r}", info.limits.max_sequence_tokens)
        raise IncompatibleTeacherError(f"{said}, or serve the teacher with a higher limit.")


def _check_needs(info: pb.TeacherInfo, needs: Needs, roles: set[str]) -> None:
    for need in needs.signals:
        if need.role not in roles:
            continue
        kind = need.spec.kind
        if _KINDS[kind] not in info.payloads:
            served = ", ".join(pb.PayloadKind.Name(p).removeprefix("PAYLOAD_KIND_").lower() for p in info.payloads)
            raise IncompatibleTeacherError(
                f"the objective needs payload {kind}, but teacher {info.name!r} ({info.engine}) serves {served}; "
                "change the payload, or serve the teacher with another engine."
            )
        if need.spec.k > info.limits.max_k:
            raise IncompatibleTeacherError(
                f"the objective needs k = {need.spec.k}, but teacher {info.name!r} allows at most "
                f"{info.limits.max_k}; lower k, or raise the server's limit."
            )
        if not MIN_TEMPERATURE <= need.level <= MAX_TEMPERATURE:
            raise ConfigError(
                f"the objective needs teacher {info.name!r} at temperature {need.level:g}, but servers accept "
                f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}; change rollout.temperature, or set teacher_temperature."
            )
        # Hidden states come before the temperature, which the student then divides by itself.
        if need.level != 1.0 and not info.supports_temperature and kind is not PayloadKind.HIDDEN:
            raise IncompatibleTeacherError(
                f"the objective needs temperature {need.level:g}, but teacher {info.name!r} ({info.engine}) scores at "
                "temperature 1 only; use payload hidden or another engine, or set teacher_temperature to 1."
            )


def _check_self_agreement(fleet: ScoreSource, info: pb.TeacherInfo, tolerance: float) -> None:
    """Score one test row twice; the answers must agree within `tolerance` nats."""
    ids = np.arange(8, dtype=np.uint32) % max(1, info.tokenizer.size)
    first, second = (fleet.score(info.name, [ScoreItem(ids, 4)], PayloadSpec.sampled())[0].sampled for _ in range(2))
    if first is None or second is None:
        raise IncompatibleTeacherError(f"teacher {info.name!r} returned no log-probs for the test row.")
    gap = float(np.abs(first - second).max())
    if not gap <= tolerance:  # written so that NaN fails
        raise IncompatibleTeacherError(
            f"teacher {info.name!r} returned log-probs for one test row that differ by {gap:.3g} nats between two "
            f"calls, over the tolerance of {tolerance:g}; check whether its replicas differ in weights or precision."
        )
