"""Requests: what an engine decodes for a planned row, and how the result becomes a row; the same for every engine.

    read by the engine    behaviour_prompt or prompt, then prefix_ids
    kept in the row       prompt_ids: those of `prompt`; response_ids: prefix_ids, then what was sampled

The prefix is not sampled: it is masked, its log-probs are NaN, and its candidates are filler that nothing reads.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from opd.errors import DataError, NonFiniteError
from opd.tasks.encode import encode_prompts
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow
from student.data.row import Row
from student.data.streams import stream, uniforms
from student.rollout.spec import RolloutSpec


class Request:
    """A row that is being sampled.

    Args:
        planned: the planned row.
        tokenizer: the student's tokenizer.
        spec: settings that every rollout of the run shares.
        purpose: first part of the key of the random stream.
        encoded: result of `encode_planned` for all rows of the call; None to encode this row's prompts alone.

    Attributes:
        input_ids: [P'] uint32, what the engine reads before the first token that it samples.
        prompt_ids: [P] uint32, the prompt that the row is trained under.
        stops: ids that end the response.
        ids, logp, candidates: what has been sampled so far, one entry per token.
        moe_routes: arrays [*, layers, k] of the experts of the tokens read so far; empty unless they are recorded.

    Raises:
        DataError: for a prompt that encodes to no token, or one over the limit.
    """

    def __init__(
        self,
        planned: PlannedRow,
        tokenizer: PreTrainedTokenizerBase,
        spec: RolloutSpec,
        purpose: Sequence[object],
        encoded: Mapping[int, NDArray[np.uint32]] | None = None,
    ) -> None:
        if encoded is None:
            encoded = encode_planned([planned], tokenizer, spec.max_prompt_tokens)
        self.planned = planned
        self.prompt_ids = encoded[id(planned.prompt)]
        hinted = planned.behaviour_prompt
        self.behaviour_ids = None if hinted is None else encoded[id(hinted)]
        read = self.prompt_ids if self.behaviour_ids is None else self.behaviour_ids
        self.input_ids = np.concatenate([read, np.array(planned.prefix_ids, dtype=np.uint32)])
        self.stops = spec.stops(tokenizer) | planned.stop_ids
        self._purpose, self._seed = tuple(purpose), spec.seed
        self.ids: list[int] = []
        self.logp: list[float] = []
        self.candidates: list[NDArray[np.uint32]] = []
        self.moe_routes: list[NDArray[np.int16]] = []

    @property
    def longest(self) -> int:
        """The maximum number of tokens of prompt and response together."""
        return len(self.input_ids) + self.planned.max_new_tokens

    def uniforms(self) -> NDArray[np.float64]:
        """[max_new_tokens] uniform numbers in (0, 1), one per token, from the row's own random stream."""
        key = self.planned.key
        # Drawn all at once, so that a token's number depends only on its index, not on when it is read.
        generator = stream(self._seed, *self._purpose, key.step, key.uid, key.sample, key.turn, key.agent)
        return uniforms(generator, self.planned.max_new_tokens)

    def take(self, token: int, logp: float, candidates: NDArray[np.uint32] | None) -> bool:
        """Keep a sampled token; returns whether it ends the response.

        Raises:
            NonFiniteError: for a log-prob that is NaN or infinite.
        """
        if not math.isfinite(logp):
            raise NonFiniteError(
                f"the student's log-probs were not finite while it answered {self.planned.prompt.name}; lower "
                "train.learning_rate, or resume from an earlier checkpoint."
            )
        self.ids.append(token)
        self.logp.append(logp)
        if candidates is not None:
            self.candidates.append(candidates)
        return token in self.stops or len(self.ids) >= self.planned.max_new_tokens

    def row(self, tokenizer: PreTrainedTokenizerBase, version: int) -> Row:
        """The finished row."""
        planned, prefix = self.planned, len(self.planned.prefix_ids)
        response = np.array([*planned.prefix_ids, *self.ids], dtype=np.uint32)
        length = len(response)
        return Row(
            key=planned.key,
            prompt=planned.prompt,
            prompt_ids=self.prompt_ids,
            response_ids=response,
            behaviour_logp=np.array([np.nan] * prefix + self.logp, dtype=np.float32),
            policy_version=np.full(length, version, dtype=np.int32),
            loss_mask=np.arange(length) >= prefix,
            truncated=self.ids[-1] not in self.stops,
            text=str(tokenizer.decode(self.ids, skip_special_tokens=True)),
            candidates=_with_prefix(self.candidates, prefix),
            origin="policy" if planned.behaviour_prompt is None else "hinted",
            behaviour_prompt_ids=self.behaviour_ids,
            turns=((prefix, length),),
            tags=dict(planned.tags),
            # Not for a hinted row, which was sampled under other tokens than it is trained under.
            moe_routes=np.concatenate(self.moe_routes) if self.moe_routes and self.behaviour_ids is None else None,
        )


def _with_prefix(candidates: Sequence[NDArray[np.uint32]], prefix: int) -> NDArray[np.uint32] | None:
    """[T, K] candidates with filler for the prefix, because a micro-batch needs K ids at every position."""
    if not candidates:
        return None
    filler = np.arange(len(candidates[0]), dtype=np.uint32)
    return np.stack([filler] * prefix + list(candidates))


def encode_planned(
    planned: Sequence[PlannedRow], tokenizer: PreTrainedTokenizerBase, limit: int
) -> dict[int, NDArray[np.uint32]]:
    """Encode every prompt of `planned` once; returns its ids by `id()` of the prompt object.

    The uid would not do as a key, because a prompt keeps it when a hint or a turn is added. `planned` must outlive the
    result.

    Raises:
        DataError: for a prompt that encodes to no token, or one of more than `limit`.
    """
    prompts: dict[int, Prompt] = {}
    for row in planned:
        for prompt in (row.prompt, row.behaviour_prompt):
            if prompt is not None:
                prompts[id(prompt)] = prompt
    encoded = {}
    for prompt, ids in zip(prompts.values(), encode_prompts([*prompts.values()], tokenizer), strict=True):
        if len(ids) > limit:
            raise DataError(
                f"{prompt.name} has {len(ids)} tokens, over the limit of {limit}; raise rollout.max_prompt_tokens or "
                "drop the prompt."
            )
        encoded[id(prompt)] = np.array(ids, dtype=np.uint32)
    return encoded
