"""The handshake: before the first step, student and every served model must fit, or the run is refused.

Checks tokenizer, vocabulary, payloads, temperature and limits, and scores one probe twice per served model.
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from opd.errors import ConfigError, IncompatibleTeacherError, TeacherNotFoundError
from opd.fleet.source import ScoreSource
from opd.tasks.source import PromptSource
from opd.wire.fingerprint import tokenizer_fingerprint
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from student.recipe import Recipe, TeacherSettings
from student.scoring.needs import REFERENCE, TEACHER, Needs
from student.scoring.score import build_router, destination

_KINDS = {
    PayloadKind.SAMPLED: pb.PAYLOAD_KIND_SAMPLED,
    PayloadKind.TOPK: pb.PAYLOAD_KIND_TOPK,
    PayloadKind.GATHER: pb.PAYLOAD_KIND_GATHER,
    PayloadKind.HIDDEN: pb.PAYLOAD_KIND_HIDDEN,
    PayloadKind.FULL: pb.PAYLOAD_KIND_FULL,
}
_MIXABLE = {PayloadKind.SAMPLED, PayloadKind.GATHER}
_ROUTED_PROMPTS = 1000


def named_roles(settings: TeacherSettings, served: Sequence[str], needs: Needs) -> dict[str, set[str]]:
    """Roles of every served model that the recipe names, by name.

    Raises:
        TeacherNotFoundError: when the recipe names a model that the fleet does not serve.
        ConfigError: when an objective needs a reference and the recipe names none, or teachers are mixed under a
            payload whose mixture is not determined.
    """
    roles: dict[str, set[str]] = {}
    wanted = {need.role for need in needs.signals}
    if TEACHER in wanted:
        targets = [target for target in (settings.default, *settings.routes.values()) if target is not None]
        kinds = {need.spec.kind for need in needs.signals if need.role == TEACHER}
        if settings.several and settings.combine == "probability" and kinds - _MIXABLE:
            raise ConfigError(
                f"several teachers on one row can be mixed with payload sampled or gather, not {', '.join(kinds)}; "
                "change the payload, set teachers.combine to divergence or route each prompt to one teacher."
            )
        for name in (name for target in targets for name in ([target] if isinstance(target, str) else target)):
            roles.setdefault(name, set()).add(TEACHER)
    if REFERENCE in wanted:
        if settings.reference is None:
            raise ConfigError("the objective needs a reference; set teachers.reference to a served model.")
        roles.setdefault(settings.reference, set()).add(REFERENCE)
    for name in roles:
        if name not in served:
            raise TeacherNotFoundError(
                f"the recipe names teacher {name!r}, but the fleet serves {', '.join(served) or 'nothing'}."
            )
    return roles


def shake_hands(
    fleet: ScoreSource, recipe: Recipe, needs: Needs, tokenizer: PreTrainedTokenizerBase, source: PromptSource
) -> dict[str, pb.TeacherInfo]:
    """Route the prompts and check every served model that the run will use.

    Returns:
        Their descriptions by name, for the run folder.

    Raises:
        IncompatibleTeacherError: with both sides named.
        ConfigError: for a prompt without a teacher.
    """
    settings = recipe.teachers
    if settings is None:
        raise ConfigError("the objective needs a teacher; set teachers.endpoints.")
    served = sorted(fleet.teachers())
    roles = named_roles(settings, served, needs)
    if needs.teacher:
        for name in routed_teachers(settings, served, source, recipe.eval.prompts):
            roles.setdefault(name, set()).add(TEACHER)
    fingerprint = tokenizer_fingerprint(tokenizer)
    infos = {}
    for name, wanted in roles.items():
        info = fleet.describe(name)
        _check_tokenizer(info, tokenizer, fingerprint)
        _check_needs(info, recipe, needs, wanted)
        if not fleet.recorded:
            _check_probe(fleet, info, settings.fleet.health.agreement_nats)
        infos[name] = info
    return infos


def routed_teachers(settings: TeacherSettings, served: Sequence[str], source: PromptSource, heldout: int) -> list[str]:
    """Teachers that the prompts go to: an unmapped prompt stops the run before its first step.

    Every pair (teacher, domain) that a prompt can carry is routed. Where the source cannot tell its pairs, the first
    training prompts and the `heldout` ones of evaluations are; a later prompt without a teacher, or with one that none
    of these goes to, stops the run with the state saved.

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


def _check_tokenizer(info: pb.TeacherInfo, tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> None:
    student = tokenizer.name_or_path
    if info.tokenizer.fingerprint != fingerprint:
        raise IncompatibleTeacherError(
            f"student {student!r} (tokenizer of {len(tokenizer)} ids, fingerprint {fingerprint[:12]}) and teacher "
            f"{info.name!r} (tokenizer of {info.tokenizer.size} ids, fingerprint {info.tokenizer.fingerprint[:12]}) "
            "have different tokenizers; token-level distillation needs the same one."
        )
    if info.vocab_size < len(tokenizer):
        raise IncompatibleTeacherError(
            f"teacher {info.name!r} has {info.vocab_size} vocabulary rows, fewer than the {len(tokenizer)} ids of the "
            f"tokenizer of student {student!r}."
        )


def _check_needs(info: pb.TeacherInfo, recipe: Recipe, needs: Needs, roles: set[str]) -> None:
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_new_tokens
    if longest > info.limits.max_sequence_tokens:
        raise IncompatibleTeacherError(
            f"rollouts may have {longest} tokens (rollout.max_prompt_tokens + rollout.max_new_tokens), but teacher "
            f"{info.name!r} takes {info.limits.max_sequence_tokens}; lower them or serve with a longer limit."
        )
    for need in needs.signals:
        if need.role not in roles:
            continue
        kind = need.spec.kind
        if _KINDS[kind] not in info.payloads:
            served = ", ".join(pb.PayloadKind.Name(p).removeprefix("PAYLOAD_KIND_").lower() for p in info.payloads)
            raise IncompatibleTeacherError(
                f"the objective needs payload {kind}, but teacher {info.name!r} ({info.engine}) serves {served}."
            )
        if need.spec.k > info.limits.max_k:
            raise IncompatibleTeacherError(
                f"the objective needs k = {need.spec.k}, but teacher {info.name!r} allows at most {info.limits.max_k}."
            )
        if need.temperature != 1.0 and not info.supports_temperature and kind is not PayloadKind.HIDDEN:
            raise IncompatibleTeacherError(
                f"the objective needs temperature {need.temperature}, but teacher {info.name!r} ({info.engine}) scores "
                "at temperature 1 only; use payload hidden or another engine."
            )


def _check_probe(fleet: ScoreSource, info: pb.TeacherInfo, tolerance: float) -> None:
    """Score one probe twice: a teacher that disagrees with itself beyond the tolerance cannot teach."""
    ids = np.arange(8, dtype=np.uint32) % max(1, info.tokenizer.size)
    first, second = (fleet.score(info.name, [ScoreItem(ids, 4)], PayloadSpec.sampled())[0].sampled for _ in range(2))
    if first is None or second is None:
        raise IncompatibleTeacherError(f"teacher {info.name!r} answered the probe without log-probs.")
    gap = float(np.abs(first - second).max())
    if not gap <= tolerance:
        raise IncompatibleTeacherError(
            f"teacher {info.name!r} scored the same probe {gap:.3g} nats apart, over the tolerance of {tolerance:g}; "
            "look for mixed weights or precision among its replicas."
        )
