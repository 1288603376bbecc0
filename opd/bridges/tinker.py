"""A fleet as a teacher for Tinker's cookbook: what its distillation asks of a `SamplingClient`.

    teacher = FleetTeacher(TeacherFleet.connect("10.0.0.1:7070"), "math")
    logprobs = await teacher.compute_logprobs(prompt)       # a tinker.ModelInput

The cookbook (0.6.1, `incorporate_kl_penalty`) takes such objects as its teacher clients. Nothing here imports tinker.
"""

import asyncio
from collections.abc import Generator
from typing import Any, Protocol

from opd.errors import InvalidRequestError
from opd.fleet.source import ScoreFuture, ScoreSource
from opd.wire.types import PayloadSpec, ScoreItem


class Prompt(Protocol):
    """A `tinker.ModelInput` of tokens alone."""

    def to_ints(self) -> list[int]:
        """The tokens."""


class LogProbs:
    """The log-probs of a sequence, to be awaited or waited for, as Tinker's `APIFuture`."""

    def __init__(self, scores: ScoreFuture, unscored: int) -> None:
        self._scores = scores
        self._unscored = unscored

    def result(self, timeout: float | None = None) -> list[float | None]:
        """Wait for one log-prob for each token, None for those that are not scored."""
        sampled = self._scores.result(timeout).sampled
        return [None] * self._unscored + ([] if sampled is None else sampled.tolist())

    async def coroutine(self) -> list[float | None]:
        """The same, awaited."""
        await asyncio.wrap_future(self._scores)
        return self.result()

    def __await__(self) -> Generator[Any, None, list[float | None]]:
        return self.coroutine().__await__()


class FleetTeacher:
    """A teacher of a fleet.

    Args:
        fleet: the fleet.
        teacher: the teacher's name.
        temperature: divides the teacher's logits.
    """

    def __init__(self, fleet: ScoreSource, teacher: str, *, temperature: float = 1.0) -> None:
        self._fleet = fleet
        self._teacher = teacher
        self._temperature = temperature

    def compute_logprobs(self, prompt: Prompt, prompt_logprobs_last_n: int | None = None) -> LogProbs:
        """The log-prob of each token from all before it; None for the first, and for all but the last n if n is given.

        Raises:
            InvalidRequestError: if n is below 1 or above the number of tokens behind the first.
        """
        ids = prompt.to_ints()
        count = len(ids) - 1 if prompt_logprobs_last_n is None else prompt_logprobs_last_n
        if not 1 <= count < len(ids):
            raise InvalidRequestError(
                f"prompt_logprobs_last_n is {count}, but {len(ids)} tokens have 1 to {len(ids) - 1}."
            )
        item = ScoreItem(ids, len(ids) - count)  # type: ignore[arg-type]  # a list becomes an array
        (scores,) = self._fleet.submit_many(self._teacher, [item], PayloadSpec.sampled(), temperature=self._temperature)
        return LogProbs(scores, len(ids) - count)

    async def compute_logprobs_async(
        self, prompt: Prompt, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """The form of Tinker before 0.38."""
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)
