"""Asks a chat model for one word out of a few."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from opd.tasks.chat import ChatClient


def word_of(client: ChatClient, question: str, words: Collection[str]) -> str | None:
    """The last of `words`, in small letters, that the model's answer to a question holds; None if it holds none.

    Raises:
        ChatFailed: if the model gave no answer.
    """
    said = client.ask([{"role": "user", "content": question}])
    found = re.findall(rf"\b({'|'.join(words)})\b", said, re.IGNORECASE)
    return found[-1].lower() if found else None
