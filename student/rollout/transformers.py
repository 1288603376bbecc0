"""Samples responses with a transformers model and a KV cache, with one random stream per row.

Rows are decoded in slots that are refilled as they become free (`student.rollout.slots`). Models that do not allow
this, as a trial finds (`student.model.trial`): rows beyond a sliding window, states other than keys and values, flash
attention, decode in batches (`student.rollout.batches`).
A row leaves as soon as it has finished, through a callback, so that it can be scored while others still run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opd.errors import ConfigError, DataError
from student.data.plan import PlannedRow
from student.data.row import Row
from student.model.model import evaluating
from student.model.turn import turn_of
from student.rollout.batches import BatchDecoder, check_batches
from student.rollout.requests import Request, RolloutSpec
from student.rollout.rows import Finish, sample_rows
from student.rollout.slots import SlotDecoder, takes_slots

__all__ = ["RolloutSpec", "rollout"]


def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    planned: Sequence[PlannedRow],
    spec: RolloutSpec,
    *,
    policy_version: int = 0,
    purpose: tuple[object, ...] = ("rollout",),
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Sample one response for each planned row without a given answer; rows with one are encoded and read.

    Args:
        model: causal LM to sample from; in eval mode during the call.
        tokenizer: its tokenizer.
        planned: what to sample.
        spec: settings that every rollout shares. The stop token that ends a response is kept as its last token.
        policy_version: number of steps that the weights have been trained for, recorded per token.
        purpose: first part of the key of the random streams; evaluations use another key than training.
        on_row: called with each row as soon as it is finished, in order of finishing.

    Returns:
        The rows in the order of `planned`.
    """
    # Experts are recorded for training only; nothing is learnt from the rows of evaluations and probes.
    spec = replace(spec, moe_routes=spec.moe_routes and purpose[:1] == ("rollout",))

    def decode(requests: Sequence[Request], order: Sequence[int], finish: Finish) -> None:
        with torch.no_grad(), evaluating(model), _precision(model, spec):
            _decode(model, requests, order, spec, finish)

    return sample_rows(
        model, tokenizer, planned, spec, decode, policy_version=policy_version, purpose=purpose, on_row=on_row
    )


def _decode(
    model: PreTrainedModel,
    requests: Sequence[Request],
    order: Sequence[int],
    spec: RolloutSpec,
    finish: Finish,
) -> None:
    turn = turn_of(model)
    longest = max(requests, key=lambda request: request.longest)
    if turn is not None and longest.longest > turn:
        name = longest.planned.prompt.name
        raise DataError(
            f"{name} and its answer may become {longest.longest} tokens long, over {turn}, the length up to which a "
            f"{type(model).__name__} scales positions in one way: beyond it, all its tokens would have other "
            "log-probs than those they were drawn with; lower rollout.max_new_tokens or rollout.max_prompt_tokens."
        )
    if takes_slots(model, longest.longest):
        SlotDecoder(model, [requests[i] for i in order], spec).run(lambda position: finish(order[position]))
        return
    if spec.moe_routes:
        raise ConfigError(
            f"a {type(model).__name__} is not decoded in slots, which is where the experts of a mixture are recorded; "
            "set model.attention to sdpa or eager, or replay the experts of the old policy's pass (source: old of "
            "method routing_replay)."
        )
    check_batches(model, longest.longest)
    left = deque(order)
    while left:
        batch: list[int] = []
        tokens = 0
        while left and len(batch) < spec.rows(max(tokens, requests[left[0]].longest)):
            tokens = max(tokens, requests[left[0]].longest)
            batch.append(left.popleft())

        def ended(position: int, batch: list[int] = batch) -> None:
            finish(batch[position])

        BatchDecoder(model, [requests[i] for i in batch], spec).run(ended)


@contextmanager
def _precision(model: PreTrainedModel, spec: RolloutSpec) -> Iterator[None]:
    """Autocast around the whole rollout, so that each weight is cast once and keys and values take half the memory.

    Autocast caches the casts only of tensors that require gradients, and would cast the frozen base of adapters again
    for every token. So frozen weights require gradients meanwhile; no gradients are taken here.
    """
    if spec.autocast is None:
        yield
        return
    frozen = [p for p in model.parameters() if p.dtype is torch.float32 and not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.autocast(model.device.type, spec.autocast):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
