"""`opd doctor --teacher RECIPE`: measures a recipe's student and teachers, and says which teachers to distil.

`student.checks.worth` defines the figures and the decision.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.doctor.finding import Finding, Level
from opd.errors import ConfigError, OpdError, one_line
from opd.tasks.build import build_prompts
from opd.tasks.environments.base import ENVIRONMENT
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from student.checks.worth import Kind, Worth, compare, judge
from student.data.intervals import Interval
from student.data.needs import TEACHER
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row, RowKey
from student.job.job import build_job
from student.job.preparation import connect
from student.model.model import Weights, load_tokenizer
from student.model.model_path import check_model_path
from student.rollout.answering import AnsweringModel
from student.scoring.contexts import Context
from student.scoring.verify import Verification
from student.settings.recipe import Recipe

SAMPLES = 4
K = 16
_SHORTEST = 4
"""Fewest tokens of an answer that is cut in two."""
_PARITY_NATS = 0.1
_LEVELS: dict[Kind, Level] = {"distil": "ok", "do not distil": "fail", "not enough evidence": "note"}


def examine_teacher(
    recipe: Path, overrides: Sequence[str] = (), *, model: str = "", prompts: int = 64
) -> Iterator[Finding]:
    """Give the findings on every teacher that the recipe's prompts go to.

    Args:
        recipe: file of the recipe; its objective, methods and rewards are ignored.
        overrides: settings that replace those of the file, each "dotted.key=value".
        model: folder or hub id of the weights that write the teacher's answers; "" for the model that the server names.
        prompts: number of training prompts to ask.
    """
    from opd.config import load_settings

    job = load_settings(Recipe, recipe, list(overrides))
    check_model_path(job.model.path)
    for name, worth, obstacle in measure(job, model=model, prompts=prompts):
        if obstacle:
            yield Finding("note", name, f"the teacher gives no answers here: {obstacle}")
        yield from _figures(name, worth)
        verdict = judge(worth)
        yield Finding(_LEVELS[verdict.kind], name, f"{verdict.kind}: {verdict.reason}")


def measure(recipe: Recipe, *, model: str = "", prompts: int = 64) -> Iterator[tuple[str, Worth, str]]:
    """Give for each teacher its name, the measurements, and why its weights could not answer ("" if they did).

    Raises:
        ConfigError: for a recipe without served teachers, with several teachers for one row, or with episodes.
        OpdError: as `opd train` would.
    """
    rows, infos = _students_answers(recipe, prompts)
    names = sorted({row.teacher for row in rows})
    if any(row.teachers for row in rows):
        raise ConfigError("several teachers score each row; name one of them, for example with teachers.default=NAME.")
    local = [name for name in names if name not in infos]
    if local:
        raise ConfigError(
            f"teacher {local[0]!r} is the student itself, so there is nothing to compare; name another one."
        )
    if model and len(names) > 1:
        raise ConfigError(
            f"--teacher-model gives the weights of one teacher, but the prompts go to {', '.join(names)}; send them "
            "to one with teachers.default and teachers.routes."
        )
    with ExitStack() as stack:
        source = build_prompts(recipe.prompts, seed=recipe.seed, modes=recipe.modes)
        stack.callback(source.close)
        tokenizer = load_tokenizer(Weights.of(recipe.model, None).base, recipe.model.revision)

        verification = Verification(source, recipe.rollout.verify_workers)
        stack.callback(verification.close)
        for name in names:
            mine = [row for row in rows if row.teacher == name]
            answers, obstacle = _Answers([], [], math.nan), ""
            try:
                answers = _teachers_answers(recipe, mine, infos[name], model or infos[name].model, tokenizer)
            except (OpdError, OSError, ValueError, torch.OutOfMemoryError) as error:
                # Weights that the user named must work. Those that a server names may not be on this machine.
                if model:
                    raise
                obstacle = one_line(error, 200)
            verification.collect([*mine, *answers.own, *(row for _, row in answers.rescued)])
            yield name, compare(mine, answers.own, answers.rescued, k=K, parity=answers.parity), obstacle


def _students_answers(recipe: Recipe, count: int) -> tuple[list[Row], dict[str, pb.TeacherInfo]]:
    """Answers of the student to `count` training prompts, with top-k and gather scores, and the served teachers."""
    if recipe.teachers is None:
        raise ConfigError("the recipe names no teachers, so there is nothing to examine; add the group teachers.")
    terms = [{"name": "opd", "payload": payload, "k": K, "aggregation": "constant"} for payload in ("topk", "gather")]
    recipe = recipe.model_copy(update={"objective": terms, "methods": [], "rewards": []})
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        job.local.kept.start(job.models.local)
        found = job.services.training_prompts(count, seed_names=("doctor",))
        asked = list({prompt.content_hash: prompt for prompt in found}.values())
        if any(ENVIRONMENT in prompt.extra for prompt in asked):
            raise ConfigError("answers of episodes cannot be cut in two; use prompts without environments.")
        return job.services.score(job.services.rollout(_plan(recipe, asked))), dict(job.models.infos)


def _plan(recipe: Recipe, prompts: Sequence[Prompt]) -> Any:
    settings = recipe.rollout
    return plan_step(
        0, prompts, samples=SAMPLES, max_new_tokens=settings.max_new_tokens, temperature=settings.temperature
    )


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers written on this machine by the teacher's weights.

    Attributes:
        own: answers to the prompts.
        rescued: pairs of an answer of the student and the same answer with its second half written by the teacher.
        parity: largest difference between served log-probs and those of these weights, in nats; nan if not known.
    """

    own: list[Row]
    rescued: list[tuple[Row, Row]]
    parity: float


def _teachers_answers(
    recipe: Recipe, rows: Sequence[Row], info: pb.TeacherInfo, model: str, tokenizer: Any
) -> _Answers:
    """Have the weights at `model` answer the prompts of `rows`, and write second halves of the student's answers.

    They read the prompt that the teacher reads when it scores, in the token ids of the student's tokenizer, so that
    the states are exactly those that the servers score.
    """
    check_model_path(model)
    gc.collect()  # the student's job has ended, so the two models need not fit in memory together
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    limits = [one.max_tokens or 0 for one in recipe.contexts.values()]
    longest = max(recipe.rollout.max_prompt_tokens, *limits, 1)
    answering = AnsweringModel.load(
        recipe, model, tokenizer=tokenizer, max_prompt_tokens=longest, stop_ids=info.stop_token_ids
    )
    read = _reader(recipe, info.name)
    prompts = list({row.prompt.uid: row.prompt for row in rows}.values())
    own = [_with_context(planned, read) for planned in _plan(recipe, prompts).rows]
    cut = [row for row in rows if row.length >= _SHORTEST]
    halves = [_with_context(_second_half(row, recipe.rollout), read) for row in cut]
    written = answering.answer([*own, *halves], "doctor")
    first, second = written[: len(own)], written[len(own) :]
    for row in second:  # verifiers read the whole answer, including the half that the student wrote
        row.text = str(tokenizer.decode(row.response_ids.tolist(), skip_special_tokens=True))
    return _Answers(first, list(zip(cut, second, strict=True)), _parity(recipe, info.name, first))


def _second_half(row: Row, settings: Any) -> PlannedRow:
    """The plan to continue the student's answer from its middle, within the limits of the answer as a whole."""
    prefix = tuple(row.response_ids[: row.length // 2].tolist())
    longest = min(settings.max_new_tokens, row.prompt.max_new_tokens or settings.max_new_tokens)
    key = RowKey(1, row.prompt.uid, row.key.sample)
    return PlannedRow(key, row.prompt, longest - len(prefix), settings.temperature, prefix_ids=prefix)


def _reader(recipe: Recipe, name: str) -> Callable[[Prompt], Prompt] | None:
    """The function that renders the prompt that teacher `name` reads; None if it reads the student's."""
    settings = recipe.contexts.get(name, recipe.contexts.get(TEACHER))
    return None if settings is None else Context(name, settings).render


def _with_context(planned: PlannedRow, read: Callable[[Prompt], Prompt] | None) -> PlannedRow:
    return planned if read is None else replace(planned, behaviour_prompt=read(planned.prompt))


def _parity(recipe: Recipe, name: str, rows: Sequence[Row]) -> float:
    """Largest difference in nats between served log-probs of the rows and those of the weights that sampled them here.

    nan if no server is live or it sends no log-probs.
    """
    fleet = connect(recipe)
    if fleet is None or fleet.recorded:
        return math.nan
    with fleet:
        items = [
            ScoreItem(np.concatenate([prompt, row.response_ids]), len(prompt))
            for row in rows
            for prompt in [row.prompt_ids if row.behaviour_prompt_ids is None else row.behaviour_prompt_ids]
        ]
        scores = fleet.score(name, items, PayloadSpec.sampled(), temperature=recipe.rollout.temperature)
    gaps = [
        np.abs(found.sampled - row.behaviour_logp).max()
        for row, found in zip(rows, scores, strict=True)
        if found.sampled is not None
    ]
    return float(max(gaps, default=math.nan))


def _figures(name: str, worth: Worth) -> Iterator[Finding]:
    yield Finding(
        "ok",
        name,
        f"{worth.prompts} prompts, {worth.answers} answers of the student; accuracy of the student "
        f"{worth.student:.3f}, of the teacher {worth.teacher:.3f}",
    )
    for found, words in (
        (worth.better, "the teacher's answers are correct more often by"),
        (worth.rescue, "if the teacher writes the second half, an answer of the student is correct more often by"),
        (worth.slope, "accuracy per unit of lambda, towards the teacher:"),
    ):
        if found is not None:
            yield Finding("ok" if found.low > 0 else "note", name, f"{words} {_words(found)}")
    yield Finding(
        "ok",
        name,
        f"in the student's states: reverse KL {worth.reverse_kl:.3f} nats per token, {worth.overlap:.0%} of the top "
        f"{worth.k} sets shared, {worth.mass:.1%} of the teacher's probability on the student's set, the same most "
        f"likely token at {worth.first:.0%}",
    )
    if not math.isnan(worth.parity):
        level: Level = "ok" if worth.parity < _PARITY_NATS else "note"
        yield Finding(
            level, name, f"served log-probs differ from those of these weights by at most {worth.parity:.2g} nats"
        )


def _words(found: Interval) -> str:
    return f"{found.mean:+.3f} (95 % from {found.low:+.3f} to {found.high:+.3f}, {found.count} prompts)"
