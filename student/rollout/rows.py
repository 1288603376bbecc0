"""From planned rows to finished rows: the part of sampling that all rollout engines share, whatever decodes.

Rows whose response is given as text are encoded, and read once by the student if the objective needs that. Their
`behaviour_logp` holds the student's own log-probs, as if it had sampled the response, because those of the true author
are not known. `Row.on_policy` is False, which terms check if they need tokens that the student really sampled.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd.tasks.stops import answer_end
from student.data.batch import collate, split
from student.data.plan import PlannedRow
from student.data.row import Row
from student.model.model import ProjectionSpec, Student, evaluating, logits_of
from student.model.turn import turn_of
from student.rollout.draw import most_likely
from student.rollout.lost import EngineLostError
from student.rollout.requests import Request, RolloutSpec, encode_planned

_CHUNK = 4096

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
            row = requests[index].row(policy_version)
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


@torch.no_grad()
def expert_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    planned: Sequence[PlannedRow],
    prompts: Sequence[np.ndarray],
    spec: RolloutSpec,
    policy_version: int,
) -> list[Row]:
    """One row per planned row, from its `answer` and the token that ends it, cut at its length limit.

    Args:
        model: the student, in the mode in which it is to read the rows.
        tokenizer: its tokenizer.
        planned: rows with an answer.
        prompts: their encoded prompts.
        spec: settings that every rollout of the run shares.
        policy_version: number of steps that the weights have been trained for.

    Raises:
        DataError: for an answer that encodes to no token.
    """
    stops = spec.stops(tokenizer)
    # One call for all, which takes a third of the time of a call for each.
    texts = [p.answer or "" for p in planned]
    answers = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    # For plain text the end token does not depend on the prompt, and looking it up in a tokenizer is slow.
    plain = next((answer_end(p.prompt, tokenizer, stops) for p in planned if p.prompt.messages is None), None)

    def end_of(prompt: Prompt) -> int | None:
        return plain if prompt.messages is None else answer_end(prompt, tokenizer, stops)

    rows = [
        _row(p, prompt_ids, ids, end_of, stops, policy_version)
        for p, prompt_ids, ids in zip(planned, prompts, answers, strict=True)
    ]
    kept = [row.response_ids.tolist() for row in rows]
    for row, text in zip(rows, tokenizer.batch_decode(kept, skip_special_tokens=True) if kept else (), strict=True):
        row.text = str(text)
    for temperature in sorted({p.temperature for p in planned} if spec.read_given else ()):
        same = [row for row, p in zip(rows, planned, strict=True) if p.temperature == temperature]
        longest = max(len(row.prompt_ids) + row.length for row in same)
        for part in split(same, spec.batch_rows * longest, turn=turn_of(model)):
            _read(model, [same[i] for i in part], spec, temperature or 1.0)  # greedy rows are read at temperature 1
    return rows


def _row(
    planned: PlannedRow,
    prompt_ids: np.ndarray,
    answer: Sequence[int],
    end_of: Callable[[Prompt], int | None],
    stops: frozenset[int],
    policy_version: int,
) -> Row:
    ids = [int(token) for token in answer]
    if (not ids or ids[-1] not in stops) and (end := end_of(planned.prompt)) is not None:
        ids.append(end)
    if not ids:
        raise DataError(f"the given answer {planned.answer or ''!r} to {planned.prompt.name} has no tokens; remove it.")
    # A response over the limit counts as truncated: the row has neither the rest nor the end token to learn from.
    truncated = len(ids) > planned.max_new_tokens
    ids = ids[: planned.max_new_tokens]
    return Row(
        key=planned.key,
        prompt=planned.prompt,
        prompt_ids=prompt_ids,
        response_ids=np.array(ids, dtype=np.uint32),
        behaviour_logp=np.full(len(ids), np.nan, dtype=np.float32),
        policy_version=np.full(len(ids), policy_version, dtype=np.int32),
        loss_mask=np.ones(len(ids), dtype=np.bool_),
        truncated=truncated,
        text="",  # decoded for all rows at once
        origin="expert",
        turns=((0, len(ids)),),
        tags=dict(planned.tags),
    )


def _read(model: PreTrainedModel, rows: Sequence[Row], spec: RolloutSpec, temperature: float) -> None:
    """Fill in the log-probs and candidates of `rows` from one forward pass."""
    student = Student(model)
    batch = collate(rows, range(len(rows)), model.device)
    hidden = student(batch.input_ids, batch.attention_mask, batch.sequence, batch.source)
    head, projection = student.head(), ProjectionSpec(frozenset(), spec.valid_vocab, temperature, _CHUNK)
    logp, candidates = [], []
    # In chunks, because log-probs [n, V] of all positions at once would be the largest tensor of a run.
    for start in range(0, len(hidden), _CHUNK):
        piece = slice(start, start + _CHUNK)
        scores = logits_of(hidden[piece], head, projection).log_softmax(-1)
        logp.append(scores.gather(-1, batch.token_ids[piece].unsqueeze(-1)).squeeze(-1).cpu())
        if spec.candidates:
            candidates.append(most_likely(scores, spec.candidates, spec.keep_ids).cpu())
    ends = np.cumsum([row.length for row in rows])[:-1]
    for row, part in zip(rows, np.split(torch.cat(logp).numpy().astype(np.float32), ends), strict=True):
        row.behaviour_logp = part
    if spec.candidates:
        for row, top in zip(rows, np.split(torch.cat(candidates).numpy().astype(np.uint32), ends), strict=True):
            row.candidates = top
