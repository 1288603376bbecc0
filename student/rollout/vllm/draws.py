"""The rows for which tokens are being drawn inside vLLM, passed within the process."""

from collections.abc import Sequence
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from opd.errors import RolloutEngineError
from student.rollout.requests import Request, RolloutSpec


class Draw:
    """The random numbers that a row draws with, and what it has drawn.

    Args:
        spec: settings that every rollout of the run shares.
        uniforms: [T] numbers in (0, 1), one per token.
        temperature: divides the logits; 0 is greedy.
        given: tokens to take instead of drawing, to get their log-probs.

    Attributes:
        name: the name by which a request to vLLM refers to it.
        ids, logp, candidates: what has been drawn, one entry per token.
    """

    def __init__(
        self, spec: RolloutSpec, uniforms: NDArray[np.float64], temperature: float, given: Sequence[int] = ()
    ) -> None:
        self.name = uuid4().hex
        self.spec, self.temperature = spec, temperature
        self._uniforms, self._given = uniforms, given
        self.ids: list[int] = []
        self.logp: list[float] = []
        self.candidates: list[NDArray[np.uint32] | None] = []

    def uniform(self, position: int) -> float:
        """The number for the token at `position`; an arbitrary one past the end, for a row that has just ended."""
        return float(self._uniforms[position]) if position < len(self._uniforms) else 0.5

    def forced(self, position: int) -> int | None:
        """The token to take at `position`, or None to draw one."""
        return self._given[position] if position < len(self._given) else None

    def put(self, position: int, token: int, logp: float, candidates: NDArray[np.uint32] | None) -> None:
        """Record what was drawn at `position`, and discard anything recorded from there on."""
        del self.ids[position:], self.logp[position:], self.candidates[position:]
        self.ids.append(token)
        self.logp.append(logp)
        self.candidates.append(candidates)

    def deliver(self, request: Request, token_ids: Sequence[int]) -> None:
        """Pass the drawn tokens to the request.

        Args:
            request: the row's request.
            token_ids: the tokens that vLLM reports.

        Raises:
            RolloutEngineError: if these are not the tokens that were drawn.
            NonFiniteError: for a log-prob that is NaN or infinite.
        """
        count = len(token_ids)
        if list(token_ids) != self.ids[:count] or not count:
            raise RolloutEngineError(
                f"vLLM continued {request.planned.prompt.name} with other tokens than were drawn for it; remove the "
                "entries of rollout.engine.options that affect sampling or scheduling."
            )
        for token, logp, candidates in zip(token_ids, self.logp, self.candidates, strict=False):
            request.take(token, logp, candidates)


DRAWS: dict[str, Draw] = {}
"""The draws by name while vLLM runs them. vLLM copies request parameters, so these carry only the name."""
