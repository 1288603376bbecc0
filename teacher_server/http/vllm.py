"""The routes of vLLM's server: `/v1/completions` with `prompt_logprobs`, and `/inference/v1/generate`.

    POST /v1/completions           {model, prompt: [ids] or [[ids], ...], max_tokens, prompt_logprobs: K}
    POST /inference/v1/generate    {model, token_ids, sampling_params: {max_tokens, prompt_logprobs: K}}
                                   or sampling_params: {max_tokens, prompt_logprob_token_ids, prompt_logprob_start}

The entry of position i in `prompt_logprobs` is about token i: its own id first, then the K most likely ids, each with
its log-prob and rank; position 0 is null. Row i of `prompt_token_id_logprobs` is about token start + 1 + i.

`temperature` is the teacher's, as with vLLM's `--logprobs-mode processed_logprobs`, which TRL asks for; 0, which would
choose the generated token, means 1.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import InvalidRequestError
from opd.wire.bounds import RequestBounds
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from teacher_server.http.body import distinct, id_rows, nothing_generated, require, sequences, token_row, whole_number
from teacher_server.http.numbers import blocks, joined, npy, npy_bytes, own_and_top
from teacher_server.http.question import Extras, Question, number, request_id_of, tail_fields

_SCORES_ONLY = "this server scores the given tokens and generates none; leave it out"
_ENTRY = '"%d":{"logprob":%.9g,"rank":%d,"decoded_token":null}'
_ENTRY_BYTES = 88


def completions(body: dict[str, Any], teacher: str, bounds: RequestBounds) -> Question:
    """The question in a request to `/v1/completions`.

    Raises:
        InvalidRequestError: if the route cannot answer it exactly.
    """
    _refuse_generation(body)
    require(body, "echo", (False,), "the answer holds the log-probs of the prompt alone; set prompt_logprobs instead")
    nothing_generated(body, "max_tokens")
    _, rows = sequences(body.get("prompt"))
    items = [ScoreItem(token_row(row, f"prompt {index}"), 1) for index, row in enumerate(rows)]
    extras, request_id = Extras.of(body), request_id_of(body.get("request_id"), "request_id")
    k = _top(body)
    tokens = sum(len(item.token_ids) for item in items)

    def render(index: int, scores: Scores, weights_hash: str) -> list[bytes]:
        head = {"index": index, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        head |= _echoed(body, items[index].token_ids) | _tail(extras, scores)
        return [b"{", *_fields(head, prompt_logprobs=_entries(items[index], scores)), b"}"]

    def frame(weights_hash: str) -> tuple[bytes, bytes]:
        head = {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time())}
        head |= {"model": teacher, "system_fingerprint": weights_hash, "usage": _usage(tokens)}
        before = json.dumps(head)[:-1] + ',"choices":['
        return before.encode(), b"]}"

    return Question(
        teacher,
        items,
        PayloadSpec.topk(k, "f32") if k else PayloadSpec.sampled(),
        render,
        frame,
        row_bytes=_ENTRY_BYTES * (k + 1) + 24,
        temperature=_temperature(body, extras),
        ranks=True,
        expected_weights_hash=extras.expected_weights_hash,
        request_id=request_id,
    )


def generate(body: dict[str, Any], teacher: str, bounds: RequestBounds) -> Question:
    """The question in a request to `/inference/v1/generate`.

    Raises:
        InvalidRequestError: if the route cannot answer it exactly.
    """
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise InvalidRequestError("sampling_params must be an object with max_tokens and what to score.")
    _refuse_generation(body)
    _refuse_generation(sampling)
    require(body, "output_mode", ("tokens",), _SCORES_ONLY)
    for images in ("features", "content_parts"):
        require(body, images, (), "teachers here read token ids alone; leave it out")
    nothing_generated(sampling, "max_tokens")
    extras, request_id = Extras.of(body), request_id_of(body.get("request_id"), "request_id")
    ids = token_row(body.get("token_ids"), "token_ids")
    made = _gather(sampling, ids, extras, bounds)
    if made is None:
        require(sampling, "prompt_logprob_start", (), "it goes with prompt_logprob_token_ids; leave it out")
        made = _prompt_logprobs(sampling, ids, extras)
    tokens = len(ids)

    def frame(weights_hash: str) -> tuple[bytes, bytes]:
        choice = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [], "logprobs": None}
        head = {"request_id": request_id, "model": teacher, "created": int(time.time())}
        head |= {"output_mode": "tokens", "usage": _usage(tokens), "choices": [choice]}
        head |= {"system_fingerprint": weights_hash} | _echoed(body, ids)
        return (json.dumps(head)[:-1] + ",").encode(), b"}"

    return Question(
        teacher,
        [made.item],
        made.spec,
        made.render,
        frame,
        row_bytes=made.row_bytes,
        temperature=_temperature(sampling, extras),
        ranks=made.ranks,
        expected_weights_hash=extras.expected_weights_hash,
        request_id=request_id,
    )


@dataclass(frozen=True, slots=True)
class _Made:
    item: ScoreItem
    spec: PayloadSpec
    render: Any
    row_bytes: int
    ranks: bool


def _prompt_logprobs(sampling: Mapping[str, Any], ids: Any, extras: Extras) -> _Made:
    k, item = _top(sampling), ScoreItem(ids, 1)

    def render(index: int, scores: Scores, weights_hash: str) -> list[bytes]:
        head = {"prompt_token_id_logprobs": None} | _tail(extras, scores)
        return _fields(head, prompt_logprobs=_entries(item, scores))

    spec = PayloadSpec.topk(k, "f32") if k else PayloadSpec.sampled()
    return _Made(item, spec, render, _ENTRY_BYTES * (k + 1) + 24, ranks=True)


def _gather(sampling: Mapping[str, Any], ids: Any, extras: Extras, bounds: RequestBounds) -> _Made | None:
    """A request for chosen ids; None if there are none."""
    field, given = "prompt_logprob_token_ids", sampling.get("prompt_logprob_token_ids")
    if given is None:
        return None
    require(sampling, "prompt_logprobs", (), f"a request has either it or {field}; send two requests")
    start = whole_number(sampling, "prompt_logprob_start", 0) or 0
    rows = len(ids) - 1 - start
    if rows < 1:
        raise InvalidRequestError(f"prompt_logprob_start is {start}, but {len(ids)} tokens have {len(ids) - 1} rows.")
    chosen = id_rows(given, rows, field, bounds)
    width = chosen.shape[1]
    item = ScoreItem(ids, start + 1, distinct(chosen, bounds.vocab_size))

    def render(index: int, scores: Scores, weights_hash: str) -> list[bytes]:
        if scores.values is None:
            raise ValueError("scores of payload gather hold values.")
        values = np.where(chosen < 0, np.float32(-np.inf), scores.values.astype(np.float32))
        fields = {"prompt_logprobs": None, "prompt_token_id_logprobs": npy(values)}
        return _fields(fields | _tail(extras, scores, chosen < 0))

    return _Made(item, PayloadSpec.gather(width, "f32"), render, npy_bytes(1, width) + 32, ranks=False)


def _top(fields: Mapping[str, Any]) -> int:
    """K of a request for the K most likely ids; 0 for the tokens alone."""
    if fields.get("prompt_logprobs") is None:
        raise InvalidRequestError(f"prompt_logprobs is missing, but {_SCORES_ONLY.replace('leave it out', 'set it')}.")
    return whole_number(fields, "prompt_logprobs", 0) or 0


def _temperature(fields: Mapping[str, Any], extras: Extras) -> float:
    given = fields.get("temperature")
    temperature = 1.0 if given is None else number(given, "temperature") or 1.0
    if extras.temperature is not None and temperature not in (1.0, extras.temperature):
        raise InvalidRequestError("temperature and opd.temperature differ; give one of them.")
    return temperature if extras.temperature is None else extras.temperature


def _refuse_generation(fields: Mapping[str, Any]) -> None:
    for name, harmless in (("stream", (False,)), ("n", (1,)), ("best_of", (1,)), ("logprobs", (0, False))):
        require(fields, name, harmless, _SCORES_ONLY)
    for name in ("prompt_embeds", "truncate_prompt_tokens", "logits_processors"):
        require(fields, name, (), "tokens are scored as they are given; leave it out")


def _entries(item: ScoreItem, scores: Scores) -> Iterator[bytes]:
    own = item.scored_ids
    yield b"[null"
    for part in blocks(len(own)):
        rows = []
        for ids, values, ranks in own_and_top(scores, own, part):
            flat: list[Any] = [None] * (3 * len(ids))
            flat[0::3], flat[1::3], flat[2::3] = ids, values, ranks
            rows.append(f",{{{joined(_ENTRY, len(ids)) % tuple(flat)}}}")
        yield "".join(rows).encode()
    yield b"]"


def _echoed(body: Mapping[str, Any], ids: NDArray[np.uint32]) -> dict[str, Any]:
    """The ids, for clients that compare them with what they sent."""
    return {"prompt_token_ids": ids.tolist()} if body.get("return_token_ids") is True else {}


def _tail(extras: Extras, scores: Scores, added: Any = None) -> dict[str, Any]:
    return {"opd": tail_fields(scores, added)} if extras.log_tail else {}


def _fields(fields: dict[str, Any], **written: Iterable[bytes]) -> list[bytes]:
    """The fields of a JSON object without its braces: `fields`, and values that are JSON already."""
    parts = [json.dumps(fields)[1:-1].encode()]
    for name, value in written.items():
        parts += [f',"{name}":'.encode(), *value]
    return parts


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
