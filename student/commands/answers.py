"""Writes a model's answers to a recipe's training prompts, in the JSON lines format that method `expert_rows` reads.

How an answer is chosen:

    greedy     the most likely token at every position
    sampled    one draw at the given temperature
    verified   the first of up to n draws that the verifier calls correct; prompts without one are left out
    best       of n draws, the one with the highest verdict; ties go to the answer with the highest total log-prob

The model reads each prompt in the recipe's context of the teacher, if there is one; the file has the prompt without it.

Each line is {"prompt", "answer", "tokens", "drawn", "value", "truncated"}: `tokens` is the length of the answer,
`drawn` the number of tokens in all draws made for this prompt, and `value` the verdict (null where the verifier cannot
tell). Every draw has its own named random stream, so the same recipe, model and seed give the same file.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from opd.errors import ConfigError, DataError
from opd.files import as_bytes, whole, write_whole
from opd.tasks.modes import asked_content
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from opd.tasks.verdict import VerdictStatus
from student.data.needs import TEACHER
from student.data.plan import plan_step
from student.data.row import Row
from student.scoring.contexts import Context
from student.settings.recipe import Recipe

How = Literal["greedy", "sampled", "verified", "best"]
HOWS: tuple[How, ...] = get_args(How)
_CHUNK = 1024
"""Number of prompts that are answered before their answers are written."""


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """What a file of answers contains and what it cost.

    Attributes:
        prompts: number of prompts asked.
        answered: number of prompts with an answer in the file, which is its number of lines.
        correct: share of the judged answers in the file that are correct; None when none could be judged.
        tokens: number of tokens of the answers in the file.
        drawn: number of tokens sampled in all, including those of answers that were not kept.
    """

    prompts: int
    answered: int
    correct: float | None
    tokens: int
    drawn: int


def write_answers(
    recipe: Recipe,
    source: PromptSource,
    prompts: Sequence[Prompt],
    model: str,
    out: Path,
    *,
    how: How,
    draws: int = 8,
    temperature: float = 1.0,
    log: Callable[[str], None] = lambda line: None,
) -> AnswerReport:
    """Answer `prompts` with `model` and write the file `out`, and a report of it with suffix .report.json.

    Args:
        recipe: gives lengths, batch size, dtype, attention, stop tokens, the teacher's context and seed.
        source: verifies the answers.
        prompts: the prompts to answer, each listed once.
        model: folder or hub id of the model that answers.
        out: the output file. An existing one is replaced only when all prompts are answered.
        how: how an answer is chosen, see the module.
        draws: maximum number of draws per prompt, for verified and best.
        temperature: sampling temperature; not used by greedy.
        log: called with a line of progress after each chunk of prompts.

    Raises:
        ConfigError: if the teacher's context reads outcomes, which do not exist yet.
        DataError: when no prompt has an answer, or the context cannot be rendered.
    """
    # Not above: `opd answers` checks its options with this module, and importing torch takes seconds.
    from student.rollout.answering import AnsweringModel

    settings = recipe.contexts.get(TEACHER)
    context = None if settings is None else Context(TEACHER, settings)
    if context is not None and context.reads_outcomes:
        raise ConfigError(
            "contexts.teacher reads outcomes of the student's answers (row or group), but here the teacher answers "
            "first; leave it out with contexts={}."
        )
    longest = None if settings is None else settings.max_tokens
    answering = AnsweringModel.load(recipe, model, max_prompt_tokens=longest)
    limit = recipe.rollout.max_new_tokens
    level = 0.0 if how == "greedy" else temperature

    def draw(chunk: Sequence[Prompt], number: int) -> list[Row]:
        # Random streams are named by the step. The number of the draw takes its place, so that draws differ.
        plan = plan_step(number, chunk, samples=1, max_new_tokens=limit, temperature=level)
        asked = [
            row if context is None else replace(row, behaviour_prompt=context.render(row.prompt)) for row in plan.rows
        ]
        rows = answering.answer(asked, "answers")
        for row in rows:
            row.verdict = source.verify(row.prompt, row.text)
        return rows

    out.parent.mkdir(parents=True, exist_ok=True)
    kept: list[tuple[Row, int]] = []
    drawn = 0
    # `out` is replaced by one rename at the end, so a run that reads the file that was there never sees a partial one.
    with whole(out) as file:
        for start in range(0, len(prompts), _CHUNK):
            chunk = prompts[start : start + _CHUNK]
            found, spent = _answer(chunk, draw, how, draws)
            for row, cost in found:
                file.write(as_bytes(json.dumps(_line(row, cost), ensure_ascii=False) + "\n"))
            kept += found
            drawn += spent
            log(f"{min(start + _CHUNK, len(prompts))} of {len(prompts)} prompts answered")
        if not kept:
            raise DataError(
                f"none of {len(prompts)} prompts has a {how} answer of {model}; raise the number of draws (--draws)."
            )
    report = _report(len(prompts), [row for row, _ in kept], drawn)
    write_whole(out.with_suffix(".report.json"), json.dumps(asdict(report), indent=1) + "\n")
    return report


def _report(prompts: int, kept: Sequence[Row], drawn: int) -> AnswerReport:
    judged = [row.verdict for row in kept if row.verdict is not None and row.verdict.known]
    right = sum(verdict.status is VerdictStatus.CORRECT for verdict in judged)
    tokens = sum(row.length for row in kept)
    return AnswerReport(prompts, len(kept), right / len(judged) if judged else None, tokens, drawn)


def check_how(how: str) -> How:
    """Return `how`, narrowed to the literal type.

    Raises:
        ConfigError: when it is not one of `HOWS`.
    """
    for known in HOWS:
        if how == known:
            return known
    raise ConfigError(f"--how is {how!r}; use one of {', '.join(HOWS)}.")


def _answer(
    chunk: Sequence[Prompt], draw: Callable[[Sequence[Prompt], int], list[Row]], how: How, draws: int
) -> tuple[list[tuple[Row, int]], int]:
    """Draw and choose answers.

    Returns:
        The kept rows in the order of the prompts, each with the number of tokens drawn for its prompt, and the number
        of tokens drawn for all prompts.
    """
    best: dict[str, Row] = {}
    spent: dict[str, int] = {}
    waiting = list(chunk)
    for number in range(draws if how in ("verified", "best") else 1):
        for row in draw(waiting, number):
            uid = row.prompt.uid
            spent[uid] = spent.get(uid, 0) + row.length
            if uid not in best or _rank(row) > _rank(best[uid]):
                best[uid] = row
        if how == "verified":
            waiting = [prompt for prompt in waiting if not _correct(best[prompt.uid])]
        if not waiting:
            break
    rows = [best[prompt.uid] for prompt in chunk]
    found = [(row, spent[row.prompt.uid]) for row in rows if how != "verified" or _correct(row)]
    return found, sum(spent.values())


def _correct(row: Row) -> bool:
    return row.verdict is not None and row.verdict.status is VerdictStatus.CORRECT


def _rank(row: Row) -> tuple[float, float]:
    """Sort key for the best draw: the verdict (-1 if unknown), then the total log-prob of the answer in nats."""
    value = row.verdict_value
    return -1.0 if value is None else value, float(row.behaviour_logp.sum())


def _line(row: Row, drawn: int) -> dict[str, object]:
    return {
        "prompt": _asked(row.prompt),
        "answer": row.text,
        "tokens": row.length,
        "drawn": drawn,
        "value": row.verdict_value,
        "truncated": row.truncated,
    }


def _asked(prompt: Prompt) -> object:
    """The prompt as `expert_rows` looks it up: without the system message that the recipe puts before it."""
    if prompt.messages is None:
        return prompt.text
    messages = list(prompt.messages)
    return messages if Prompt.make(messages).content_hash == asked_content(prompt) else messages[1:]
