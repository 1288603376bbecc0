"""The reference answer of a prompt, and its reading as a response by a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import DataError
from opd.wire.types import ScoreItem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from opd.tasks.prompt import Prompt


def reference_of(prompt: Prompt, reward: str) -> str:
    """The reference answer that `reward` reads.

    Raises:
        DataError: if the prompt has none, or an empty one.
    """
    if not prompt.answer:
        raise DataError(f"{prompt.name} has no reference answer, which reward {reward} needs; add one.")
    return prompt.answer


def reference_item(prompt: Prompt, reward: str, context: NDArray[np.uint32], lead: str, tokenizer: Any) -> ScoreItem:
    """The reference answer as a response to `context`, token ids, and the text `lead`.

    Raises:
        DataError: if the prompt has no reference answer, or one without tokens.
    """
    answer = tokenizer(reference_of(prompt, reward), add_special_tokens=False)["input_ids"]
    if not answer:
        raise DataError(f"{prompt.name} has a reference answer without tokens; reward {reward} needs some.")
    before = tokenizer(lead, add_special_tokens=False)["input_ids"] if lead else []
    ids = np.concatenate([context, np.array([*before, *answer], dtype=np.uint32)])
    return ScoreItem(ids, len(ids) - len(answer))
