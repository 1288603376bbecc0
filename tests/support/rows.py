"""Rows for tests that need some, whatever they say."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.tasks.prompt import Prompt
from student.data.row import Row, RowKey


def make_row(
    response: int | Sequence[int] | NDArray[Any] = 2,
    *,
    prompt: Prompt | str = "x",
    step: int = 0,
    sample: int = 0,
    behaviour: float | NDArray[Any] = 0.0,
    **fields: Any,
) -> Row:
    """A row that the student sampled, all of it trained on.

    Args:
        response: ids of the response, or how many of id 1.
        prompt: what it answers, or its text.
        step, sample: where it stands; its group is that of the prompt.
        behaviour: log-prob of every token, or one for each, nats.
        fields: anything else of `Row`, also in place of what is said here.
    """
    prompt = Prompt.make(prompt) if isinstance(prompt, str) else prompt
    ids = np.ones(response, np.uint32) if isinstance(response, int) else np.asarray(response, np.uint32)
    plain = {
        "key": RowKey(step, prompt.uid, sample),
        "prompt": prompt,
        "prompt_ids": np.ones(2, np.uint32),
        "response_ids": ids,
        "behaviour_logp": np.full(len(ids), behaviour, np.float32),
        "policy_version": np.zeros(len(ids), np.int32),
        "loss_mask": np.ones(len(ids), np.bool_),
        "truncated": False,
        "text": "",
    }
    return Row(**(plain | fields))
