"""A model's answers to a recipe's training prompts, as the file that method `expert_rows` reads.

    greedy     the most likely token at every position
    sampled    one draw at the given temperature
    verified   up to n draws: the first that the verifier calls correct; prompts without one are left out
    best       n draws: the one with the highest verdict, among equals the most probable answer as a whole

Each line is {"prompt", "answer", "tokens", "drawn", "value", "truncated"}: `drawn` counts the tokens of all draws that
the answer cost, `value` is the verdict (null where the verifier cannot tell). Draws come from streams of their own, so
the same recipe, model and seed give the same file.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from opd.errors import ConfigError, DataError
from opd.tasks.modes import asked_content
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from opd.tasks.verdict import VerdictStatus
from student.data.plan import plan_step
from student.data.row import Row
from student.recipe import Recipe
from student.rollout.answering import AnsweringModel

How = Literal["greedy", "sampled", "verified", "best"]
HOWS: tuple[How, ...] = get_args(How)
_CHUNK = 1024
"""Prompts answered between two writes."""


@dataclass(frozen=True, slots=True)
class AnswerReport:
    """What a file of answers cost.

    Attributes:
        prompts: asked.
        answered: lines of the file.
        correct: share of the judged answers in the file that are correct; None when none could be judged.
        tokens: of the answers in the file.
        drawn: sampled in all, answers that were not kept included.
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
    """Answer `prompts` with the model at path `model` and write the file in one step.

    Args:
        recipe: gives lengths, batch size, element type, attention, stop tokens and seed.
        source: verifies the answers.
        prompts: to be answered, each once.
        model: folder or hub id.
        out: the file; an existing one is replaced at the end.
        how: see the module.
        draws: most draws per prompt, for verified and best.
        temperature: of the draws; greedy has none.
        log: called with a line for people.

    Raises:
        DataError: when not one prompt has an answer.
    """
    answering = AnsweringModel.load(recipe, model)
    limit = recipe.rollout.max_new_tokens
    level = 0.0 if how == "greedy" else temperature

    def draw(chunk: Sequence[Prompt], number: int) -> list[Row]:
        # The number of the draw stands for the step in the names of the random streams, so that draws differ.
        plan = plan_step(number, chunk, samples=1, max_new_tokens=limit, temperature=level)
        rows = answering.answer(plan.rows, "answers")
        for row in rows:
            row.verdict = source.verify(row.prompt, row.text)
        return rows

    out.parent.mkdir(parents=True, exist_ok=True)
    # What is at `out` is whole at any time: the answers of hours may be in use by a run that trains on them.
    draft = out.with_suffix(".part")
    kept: list[tuple[Row, int]] = []
    drawn = 0
    with draft.open("w", encoding="utf-8") as file:
        for start in range(0, len(prompts), _CHUNK):
            chunk = prompts[start : start + _CHUNK]
            found, spent = _answer(chunk, draw, how, draws)
            for row, cost in found:
                file.write(json.dumps(_line(row, cost), ensure_ascii=False) + "\n")
            kept += found
            drawn += spent
            log(f"{min(start + _CHUNK, len(prompts))} of {len(prompts)} prompts answered")
    if not kept:
        draft.unlink()
        raise DataError(f"none of {len(prompts)} prompts has a {how} answer of {model}; raise the number of draws.")
    os.replace(draft, out)
    report = _report(len(prompts), [row for row, _ in kept], drawn)
    out.with_suffix(".report.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return report


def _report(prompts: int, kept: Sequence[Row], drawn: int) -> AnswerReport:
    judged = [row.verdict for row in kept if row.verdict is not None and row.verdict.known]
    right = sum(verdict.status is VerdictStatus.CORRECT for verdict in judged)
    tokens = sum(row.length for row in kept)
    return AnswerReport(prompts, len(kept), right / len(judged) if judged else None, tokens, drawn)


def check_how(how: str) -> How:
    """`how` as one of the known ways.

    Raises:
        ConfigError: when it is none.
    """
    for known in HOWS:
        if how == known:
            return known
    raise ConfigError(f"answers cannot be drawn {how!r}; use {', '.join(HOWS)}.")


def _answer(
    chunk: Sequence[Prompt], draw: Callable[[Sequence[Prompt], int], list[Row]], how: How, draws: int
) -> tuple[list[tuple[Row, int]], int]:
    """The kept row of each prompt with the tokens of its draws, in the order of the prompts; and all tokens drawn."""
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
    """Verdict first, then the log-prob of the whole answer, in nats."""
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
    """The prompt by which the file's reader finds it: without the system message that the recipe puts before it."""
    if prompt.messages is None:
        return prompt.text
    messages = list(prompt.messages)
    return messages if Prompt.make(messages).content_hash == asked_content(prompt) else messages[1:]
