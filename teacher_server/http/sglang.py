"""The route of SGLang's server: `/generate` with `return_logprob`.

    POST /generate    {input_ids: [ids] or [[ids], ...], sampling_params: {max_new_tokens: 0}, return_logprob: true,
                       logprob_start_len: 0, [top_logprobs_num: K],
                       [token_ids_logprob: [ids] | token_ids_logprob_positions: [[ids], ...]],
                       [return_flat_raw_top_logprobs, return_flat_raw_top_logprobs_b64]}

`meta_info` holds a list for each thing that was asked, whose entry i is about token start + i as [log-prob, id, null];
the first entry has no log-prob. Entries of `token_ids_logprob_positions` are about the token at their own position, as
with the patch that miles applies to SGLang; a position may ask for no id.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import InvalidRequestError
from opd.wire.bounds import RequestBounds
from opd.wire.types import F32, PayloadSpec, ScoreItem, Scores
from teacher_server.http.body import (
    check_size,
    distinct,
    id_rows,
    nothing_generated,
    require,
    sequences,
    token_row,
    whole_number,
)
from teacher_server.http.numbers import blocks, finite, joined
from teacher_server.http.question import Extras, Question, request_id_of, tail_fields

_ENTRY = "[%.9g,%d,null]"
_ENTRY_BYTES = 40
_POSITIONS = "token_ids_logprob_positions"
_SCORES_ONLY = "this server scores the given tokens and generates none; leave it out"


def generate(body: dict[str, Any], teacher: str, bounds: RequestBounds) -> Question:
    """The question in a request to `/generate`.

    Raises:
        InvalidRequestError: if the route cannot answer it exactly.
    """
    several, rows = sequences(body.get("input_ids"))
    body = _uniform(body) if several else body
    _check(body)
    extras = Extras.of(body)
    tokens = [token_row(row, f"input_ids {index}") for index, row in enumerate(rows)]
    start = whole_number(body, "logprob_start_len", None)
    if start is None:
        raise InvalidRequestError("logprob_start_len is missing, so no given token would be scored; set it to 0.")
    for index, ids in enumerate(tokens):
        if len(ids) < start + 2:
            raise InvalidRequestError(f"input_ids {index} has {len(ids)} tokens, none behind start {start} to score.")
    top = whole_number(body, "top_logprobs_num", 0) or 0
    chosen = _chosen(body, tokens, start, several, bounds)
    if top and chosen is not None:
        raise InvalidRequestError("top_logprobs_num and ids of one's own go in two requests; leave one of them out.")
    flat, encoded = bool(body.get("return_flat_raw_top_logprobs")), bool(body.get("return_flat_raw_top_logprobs_b64"))
    if encoded and not flat:
        raise InvalidRequestError("return_flat_raw_top_logprobs_b64 needs return_flat_raw_top_logprobs; set both.")
    spec = PayloadSpec.topk(top, "f32") if top else PayloadSpec.sampled()
    gathered: list[NDArray[np.uint32] | None] = [None] * len(tokens)
    if chosen is not None:
        spec = PayloadSpec.gather(chosen[0].shape[1], "f32")
        gathered = [distinct(ids, bounds.vocab_size) for ids in chosen]
    items = [ScoreItem(row, start + 1, gather) for row, gather in zip(tokens, gathered, strict=True)]
    names = _request_ids(body.get("rid"), several, len(items))

    def render(index: int, scores: Scores, weights_hash: str) -> list[bytes]:
        item, asked = items[index], None if chosen is None else chosen[index]
        meta: dict[str, Any] = {"id": names[index], "finish_reason": {"type": "length", "length": 0}}
        meta |= {"prompt_tokens": len(item.token_ids), "completion_tokens": 0, "cached_tokens": 0}
        meta |= {"output_token_logprobs": [], "output_token_logprobs_length": 0, "weight_version": weights_hash}
        if extras.log_tail:
            meta["opd"] = tail_fields(scores, None if asked is None else asked < 0)
        lists = {"input_token_logprobs": _own(item, scores)}
        if asked is not None:
            meta["output_token_ids_logprobs"] = []
            lists["input_token_ids_logprobs"] = _listed(scores, asked)
        elif flat and top:
            meta |= {"output_top_logprobs": []} | _flat(scores, encoded)
        elif top:
            meta["output_top_logprobs"] = []
            lists["input_top_logprobs"] = _listed(scores, None)
        parts = [f'{{"text":"","output_ids":[],"meta_info":{json.dumps(meta)[:-1]}'.encode()]
        for name, value in lists.items():
            parts += [f',"{name}":'.encode(), *value]
        return [*parts, b"}}"]

    def frame(weights_hash: str) -> tuple[bytes, bytes]:
        return (b"[", b"]") if several else (b"", b"")

    return Question(
        teacher,
        items,
        spec,
        render,
        frame,
        row_bytes=_ENTRY_BYTES * (spec.k + 1) + 24,
        temperature=1.0 if extras.temperature is None else extras.temperature,
        expected_weights_hash=extras.expected_weights_hash,
        request_id=names[0],
    )


def _uniform(body: dict[str, Any]) -> dict[str, Any]:
    """The body with one value in place of a list of equal ones, as a batch may have them."""
    fields = dict(body)
    for name in ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"):
        given = body.get(name)
        if isinstance(given, list) and given:
            if any(one != given[0] for one in given):
                raise InvalidRequestError(f"{name} differs between the sequences; send them in requests of their own.")
            fields[name] = given[0]
    return fields


def _check(body: dict[str, Any]) -> None:
    """Refuse what this route does not answer."""
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise InvalidRequestError("sampling_params must be an object with max_new_tokens: 0.")
    nothing_generated(sampling, "max_new_tokens")
    # SGLang's server ignores it for given tokens, which 0 and 1 allow for.
    require(
        sampling, "temperature", (0, 1), "this route scores at temperature 1; set opd: {temperature: T} for another"
    )
    require(sampling, "n", (1,), _SCORES_ONLY)
    require(body, "stream", (False,), _SCORES_ONLY)
    if body.get("return_logprob") is not True:
        raise InvalidRequestError("return_logprob must be true, because this server scores and does not generate.")
    for field in ("text", "input_embeds", "image_data", "video_data", "audio_data"):
        require(body, field, ([],), "teachers here read token ids alone; send input_ids")
    require(body, "lora_path", ([],), "an adapter is served as a teacher of its own; name it in the field model")
    require(body, "return_hidden_states", (False,), "hidden states travel over gRPC only; ask for payload hidden there")
    require(body, "return_text_in_logprobs", (False,), "tokens have no text here; leave it out")


def _request_ids(rid: Any, several: bool, count: int) -> list[str]:
    if several and isinstance(rid, list):
        if len(rid) != count:
            raise InvalidRequestError(f"rid has {len(rid)} ids, but there are {count} sequences.")
        return [request_id_of(one, "rid") for one in rid]
    first = request_id_of(rid, "rid")
    return [first, *(f"{first[:100]}-{index}" for index in range(1, count))]


def _chosen(
    body: dict[str, Any], tokens: list[NDArray[np.uint32]], start: int, several: bool, bounds: RequestBounds
) -> list[NDArray[np.int64]] | None:
    """[N, K] ids to score for each sequence, -1 for none; None if the request names none."""
    everywhere, positions = body.get("token_ids_logprob"), body.get(_POSITIONS)
    if everywhere is not None and positions is not None:
        raise InvalidRequestError(f"token_ids_logprob and {_POSITIONS} exclude each other; leave one of them out.")
    if everywhere is not None:
        own = several and isinstance(everywhere, list) and bool(everywhere) and isinstance(everywhere[0], list)
        lists = everywhere if own else [everywhere] * len(tokens)
        _same_count("token_ids_logprob", lists, tokens)
        rows = [id_rows([one], 1, "token_ids_logprob", bounds) for one in lists]
        check_size(sum(len(ids) for ids in tokens), max(row.shape[1] for row in rows), "token_ids_logprob", bounds)
        found = [np.repeat(row, len(ids) - 1 - start, axis=0) for row, ids in zip(rows, tokens, strict=True)]
    elif positions is not None:
        lists = positions if several else [positions]
        _same_count(_POSITIONS, lists, tokens)
        found = []
        for one, ids in zip(lists, tokens, strict=True):
            behind = one[start + 1 :] if isinstance(one, list) and len(one) == len(ids) else one
            found.append(id_rows(behind, len(ids) - 1 - start, _POSITIONS, bounds))
    else:
        return None
    width = max(ids.shape[1] for ids in found)
    check_size(sum(map(len, found)), width, _POSITIONS if everywhere is None else "token_ids_logprob", bounds)
    return [np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1) for ids in found]


def _same_count(name: str, lists: Any, tokens: list[Any]) -> None:
    if not isinstance(lists, list) or len(lists) != len(tokens):
        raise InvalidRequestError(f"{name} must have an entry for each of the {len(tokens)} sequences.")


def _own(item: ScoreItem, scores: Scores) -> Iterator[bytes]:
    """The log-prob of each token from the start."""
    if scores.sampled is None:
        raise ValueError("every payload of this route holds the log-prob of each token.")
    ids = item.scored_ids
    yield f"[[null,{item.token_ids[item.prompt_length - 1]},null]".encode()
    for part in blocks(len(ids)):
        yield f",{_pairs([len(ids[part])], ids[part], finite(scores.sampled[part]))}".encode()
    yield b"]"


def _listed(scores: Scores, asked: NDArray[np.int64] | None) -> Iterator[bytes]:
    """The ids of each position with their log-probs; of `asked` without those that are -1."""
    if scores.values is None or scores.ids is None:
        raise ValueError("payloads topk and gather hold ids and values.")
    yield b"[null"
    for part in blocks(len(scores.ids)):
        ids, values = scores.ids[part], finite(scores.values[part])
        kept = np.ones(ids.shape, bool) if asked is None else asked[part] >= 0
        yield f",{_pairs(kept.sum(1).tolist(), ids[kept], values[kept], '[{}]')}".encode()
    yield b"]"


def _pairs(counts: list[int], ids: NDArray[np.uint32], values: F32, form: str = "{}") -> str:
    """Entries of ids and values, so many to each `form`."""
    pairs: list[Any] = [None] * (2 * len(ids))
    pairs[0::2], pairs[1::2] = values.tolist(), ids.tolist()
    return ",".join(form.format(joined(_ENTRY, count)) for count in counts) % tuple(pairs)


def _flat(scores: Scores, encoded: bool) -> dict[str, Any]:
    """The listed ids as flat arrays with their shape."""
    if scores.values is None or scores.ids is None:
        raise ValueError("payload topk holds ids and values.")
    values, ids = finite(scores.values).astype("<f4"), scores.ids.astype("<i4")
    name = "input_top_logprobs"
    if encoded:
        fields: dict[str, Any] = {
            f"{name}_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
            f"{name}_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
            f"{name}_val_flat_b64_dtype": "float32",
            f"{name}_idx_flat_b64_dtype": "int32",
        }
    else:
        fields = {f"{name}_val_flat": values.ravel().tolist(), f"{name}_idx_flat": ids.ravel().tolist()}
    return fields | {f"{name}_shape": list(values.shape), f"{name}_null_prefix": 1}
