"""From planned rows to finished ones, whatever decodes: the frame that every rollout engine fills in."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from student.data.plan import PlannedRow
from student.data.row import Row
from student.rollout.expert import expert_rows
from student.rollout.lost import EngineLostError
from student.rollout.requests import Request, encode_planned
from student.rollout.spec import RolloutSpec

Finish = Callable[[int], None]
Decode = Callable[[Sequence[Request], Sequence[int], Finish], None]
"""Called with the requests, the indices of those to sample in the order to begin them, and a callback that takes the
index of each that has ended."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, and in the mode it was in afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def sample_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    planned: Sequence[PlannedRow],
    spec: RolloutSpec,
    decode: Decode,
    *,
    policy_version: int = 0,
    purpose: tuple[object, ...] = ("rollout",),
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """One row for each planned one: answers that are given are read by `model`, the others come from `decode`.

    Args:
        model: the student.
        tokenizer: its tokenizer.
        planned: what to sample.
        spec: shared settings.
        decode: samples the rows without an answer.
        policy_version: steps that the weights have seen, recorded per token.
        purpose: first names of the random streams; evaluations use others than training.
        on_row: called with each row as soon as it is finished, in order of finishing.

    Returns:
        The rows in the order of `planned`.

    Raises:
        EngineLostError: when the engine went away; it holds the rows that had finished.
    """
    rows: dict[int, Row] = {}
    encoded = encode_planned(planned, tokenizer, spec.max_prompt_tokens)
    given = [i for i, p in enumerate(planned) if p.answer is not None]
    sampled = [i for i, p in enumerate(planned) if p.answer is None]
    requests = [Request(planned[i], tokenizer, spec, purpose, encoded) for i in sampled]
    try:
        if given:
            prompts = [encoded[id(planned[i].prompt)] for i in given]
            with evaluating(model) if spec.read_given else nullcontext():
                answered = expert_rows(model, tokenizer, [planned[i] for i in given], prompts, spec, policy_version)
            for i, row in zip(given, answered, strict=True):
                rows[i] = row
                on_row(row)

        def finish(index: int) -> None:
            row = requests[index].row(tokenizer, policy_version)
            rows[sampled[index]] = row
            on_row(row)

        # Rows of similar prompt length run together, with little padding. The order is a function of the plan, so that
        # a resumed run gets the same bits.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].input_ids), i))
        if order:
            decode(requests, order, finish)
    except EngineLostError as error:
        error.rows = [rows.get(i) for i in range(len(planned))]
        raise
    return [rows[i] for i in range(len(planned))]
