"""Requests: what an engine decodes for a planned row, and how the result becomes a row; the same for every engine.

    read by the engine    behaviour_prompt or prompt, then prefix_ids
    kept in the row       prompt_ids: those of `prompt`; response_ids: prefix_ids, then what was sampled

The prefix is not sampled: it is masked, its log-probs are NaN, and its candidates are filler that nothing reads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from opd.errors import DataError, NonFiniteError
from opd.tasks.encode import encode_prompts
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow
from student.data.row import Row
from student.data.streams import stream, uniforms

LEAST_ROWS = 5
"""Matrix products of fewer rows round differently; see `student.rollout.slots`."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Settings that every rollout of a run shares.

    Attributes:
        seed: the run's seed; with a row's key it determines the row's random stream.
        batch_rows: maximum number of rows decoded together.
        candidates: K, the number of most likely ids to keep per position; 0 for none.
        valid_vocab: number of ids that the tokenizer can produce.
        max_prompt_tokens: longer prompts are an error.
        stop_ids: ids that end a response; empty for the tokenizer's end of sequence alone.
        stop_texts: texts that end a response where they appear.
        keep_ids: ids that are always among the candidates, fewer than `candidates`.
        cache_tokens: bound on the tokens whose keys and values are held at once, counted as rows times the maximum
            length of a row; five rows always run.
        autocast: dtype of matrix products and of keys and values; None for the dtype of the weights.
        read_given: whether the student reads given answers for their log-probs and candidates; otherwise their
            log-probs are NaN.
        moe_routes: record the experts that each token is routed to (`Row.moe_routes`), in rollouts for training.
    """

    seed: int
    batch_rows: int
    candidates: int
    valid_vocab: int
    max_prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    keep_ids: tuple[int, ...] = ()
    cache_tokens: int = 262_144
    autocast: torch.dtype | None = None
    read_given: bool = True
    moe_routes: bool = False

    def rows(self, longest: int) -> int:
        """The number of rows to decode together if each may become `longest` tokens long."""
        return min(self.batch_rows, max(LEAST_ROWS, self.cache_tokens // max(1, longest)))

    def stops(self, tokenizer: Any) -> frozenset[int]:
        """Ids that end a response; without any, every response runs to its length limit."""
        if self.stop_ids:  # checked first, because asking a tokenizer is slow and every row asks
            return self.stop_ids
        eos = tokenizer.eos_token_id
        return frozenset(() if eos is None else (int(eos),))


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
        ended: whether the response has ended by a stop token or a stop text.
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
        self.ended = False
        self._purpose, self._seed = tuple(purpose), spec.seed
        self._tokenizer, self._stop_texts = tokenizer, spec.stop_texts
        # A text of n bytes lies within n tokens. With one more, tokenizers that drop a space before the first cannot
        # drop that of the text.
        self._window = 1 + max((len(text.encode()) for text in spec.stop_texts), default=0)
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

        Tokens after the end are dropped: engines that sample whole responses go on after a stop text.

        Raises:
            NonFiniteError: for a log-prob that is NaN or infinite.
        """
        if self.ended:
            return True
        if not math.isfinite(logp):
            raise NonFiniteError(
                f"the student's log-probs were not finite while it answered {self.planned.prompt.name}; lower "
                "train.learning_rate, or resume from an earlier checkpoint."
            )
        self.ids.append(token)
        self.logp.append(logp)
        if candidates is not None:
            self.candidates.append(candidates)
        self.ended = token in self.stops or self._stopped()
        return self.ended or len(self.ids) >= self.planned.max_new_tokens

    def _stopped(self) -> bool:
        """Whether the last token completes a stop text."""
        if not self._stop_texts:
            return False
        tail = str(self._tokenizer.decode(self.ids[-self._window :], skip_special_tokens=False))
        return any(text in tail for text in self._stop_texts)

    def _text(self) -> str:
        """The response as text, up to a stop text; what a branch took over from another row belongs to it."""
        ids = [*self.planned.prefix_ids, *self.ids] if self.planned.key.parent >= 0 else self.ids
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return text[: min((at for stop in self._stop_texts if (at := text.find(stop)) >= 0), default=len(text))]

    def row(self, version: int) -> Row:
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
            truncated=not self.ended,
            text=self._text(),
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
