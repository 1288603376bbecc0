"""Episodes of a lock, which the student summarises where the next observation would not fit."""

from random import Random
from typing import Any

from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.prompt import Prompt
from student.data.row import Row
from tests.support.scripted import Scripted, make_player, plan

LOCK = Lock(LockOptions(digits=4, turns=6))
PROMPT = LOCK.draw(Random(0))
PATH = PROMPT.extra["path"]
TURN, SUMMARY = 4, 3


def limits(prompt: Prompt, tokenizer: Any, room: int = 2, **summary: Any) -> dict[str, Any]:
    """`room` tokens more than the least in which a lock's episode reads two turns before it is summarised."""
    read = len(tokenizer(f"{prompt.text}{prompt.extra['register']}")["input_ids"]) + 3 * 2
    least = read + TURN + len("sum") + room
    return {"context_tokens": least, "tokens": SUMMARY, "instruction": "sum", **summary}


def played(
    tokenizer: Any, says: list[str], room: int = 2, cut: tuple[int, ...] = (), turns: int = 6, **summary: Any
) -> tuple[Row, Scripted]:
    settings = limits(PROMPT, tokenizer, room, **summary)
    player = make_player(tokenizer, turn_tokens=TURN, turns=turns, history="summary", summary=settings)
    student = Scripted(tokenizer, {PROMPT.uid: says}, cut)
    (row,) = player.play(plan([PROMPT]), student, purpose=("rollout",), on_row=lambda row: None)
    player.close()
    longest = max(len(row.prompt_ids) + end - since for since, _, end in row.sequences)
    assert longest <= settings["context_tokens"]
    return row, student
