"""From planned rows to finished rows: the part of sampling that all rollout engines share, whatever decodes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from student.data.plan import PlannedRow
from student.data.row import Row
from student.model.model import evaluating
from student.rollout.expert import expert_rows
from student.rollout.lost import EngineLostError
from student.rollout.requests import Request, encode_planned
from student.rollout.spec import RolloutSpec

Finish = Callable[[int], None]
Decode = Callable[[Sequence[Request], Sequence[int], Finish], None]
"""Called with the requests, the indices of those to sample in the order to start them, and a callback to call with the
index of each request that has ended."""


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
    """One row for each planned row: `decode` samples the rows without an answer, `model` reads given answers.

    Args:
        model: the student.
        tokenizer: its tokenizer.
        planned: what to sample.
        spec: settings that every rollout of the run shares.
        decode: samples the rows without an answer.
        policy_version: number of steps that the weights have been trained for, recorded per token.
        purpose: first part of the key of the random streams; evaluations use another key than training.
        on_row: called with each row as soon as it is finished, in order of finishing.

    Returns:
        The rows in the order of `planned`.

    Raises:
        EngineLostError: if the engine was lost; the error holds the rows that had finished.
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

        # Rows of similar prompt length run together, with little padding. The order depends on the plan alone, so that
        # a resumed run samples the same bits.
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].input_ids), i))
        if order:
            decode(requests, order, finish)
    except EngineLostError as error:
        error.rows = [rows.get(i) for i in range(len(planned))]
        raise
    return [rows[i] for i in range(len(planned))]
