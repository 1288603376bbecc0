"""Work that must not stop half-way, whatever happens to the call that asked for it."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

R = TypeVar("R")


async def run_to_completion(work: Awaitable[R]) -> R:
    """The result of `work`; a caller that is cancelled waits for its end too, and is cancelled then.

    A client may leave at any `await`. Weights that are half swapped, or a teacher whose engine sleeps while its state
    says otherwise, would be left behind; and what runs on a thread cannot be stopped anyway.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await asyncio.shield(task)
        raise
