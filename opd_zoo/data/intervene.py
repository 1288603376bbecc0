"""InT: with the solution at hand, a model names the first mistake of a wrong attempt and corrects that one step.

    attempt = steps s_1 .. s_n;   k the first wrong one, c its correction
    row: prompt followed by s_1 .. s_{k-1},  answer c          only the correction is learnt
         with whole: prompt, answer s_1 .. s_{k-1}, c          the right beginning is learnt too

The wrong step never enters a row. Rows are for cross-entropy before a reinforcement (method expert_rows with
`source: answer`). Source: InT, by its abstract (self-proposed interventions against a reference solution, supervised
on the prefix and the correction); the question and the form are ours.
"""

from collections.abc import Mapping
from typing import Any

from opd.tasks.chat import ChatClient, object_in
from opd_zoo.prompts import filled

QUESTION = """Problem:
{prompt}

The right solution:
{solution}

A wrong attempt, in numbered steps:
{steps}

Find the first wrong step and write what should stand in its place, one step and no more. Answer with JSON alone:
{"step": number, "correction": "..."}"""


class NotMade(Exception):
    """Nothing was made of a row; the message says why in a few words."""


def steps_of(attempt: str, mark: str) -> list[str]:
    """The steps of an attempt, with the marks that end them."""
    parts = attempt.split(mark)
    return [part + mark for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def intervened(
    row: Mapping[str, Any], client: ChatClient, *, mark: str = "\n", whole: bool = False, question: str = QUESTION
) -> dict[str, Any]:
    """The row to learn from.

    Args:
        row: with texts `prompt`, `solution` and `attempt`.
        client: the model that names the mistake.
        mark: text that ends a step.
        whole: learn the right steps before the mistake too.
        question: what the model is asked, made of {prompt}, {solution} and {steps}.

    Raises:
        NotMade: if a column is missing, or the model names no step of the attempt.
        ChatFailed: if the model gave no answer.
    """
    texts = {name: row.get(name) for name in ("prompt", "solution", "attempt")}
    missing = [name for name, text in texts.items() if not isinstance(text, str) or not text.strip()]
    if missing:
        raise NotMade(f"no text in column {missing[0]}")
    steps = steps_of(str(texts["attempt"]), mark)
    numbered = "\n".join(f"{k}. {step.strip()}" for k, step in enumerate(steps, 1))
    text = filled(question, {**{name: str(text) for name, text in texts.items()}, "steps": numbered})
    said = object_in(client.ask([{"role": "user", "content": text}])) or {}
    place, correction = said.get("step"), said.get("correction")
    if not isinstance(place, int) or not 1 <= place <= len(steps):
        raise NotMade("the model names no step of the attempt")
    if not isinstance(correction, str) or not correction.strip():
        raise NotMade("the model gives no correction")
    if correction.strip() == steps[place - 1].strip():
        raise NotMade("the correction is the wrong step")
    before, prompt = "".join(steps[: place - 1]), str(texts["prompt"])
    kept = {name: value for name, value in row.items() if name not in ("prompt", "answer", "attempt")}
    made = (
        {"prompt": prompt, "answer": before + correction}
        if whole
        else {"prompt": prompt + before, "answer": correction}
    )
    return {**made, **kept, "step": place}
