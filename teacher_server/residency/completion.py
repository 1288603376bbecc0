"""Running work to its end even if the call that asked for it is cancelled."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

R = TypeVar("R")


async def run_to_completion(work: Awaitable[R]) -> R:
    """The result of `work`. A caller that is cancelled waits for its end too, and is cancelled only then.

    A client may leave at any `await`. Without this it could leave weights half swapped behind, or a teacher whose
    engine sleeps while its state says otherwise; and what runs on a thread cannot be stopped anyway.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await asyncio.shield(task)
        raise
