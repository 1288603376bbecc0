"""The last check before the model: refuses whatever would crash an engine or get a wrong result.

The service validates requests when it parses them. Engines repeat the checks because an id out of range destroys the
CUDA context, not only the request, and because engines are also used without the service.
"""

from collections.abc import Sequence

from opd.errors import InvalidRequestError
from opd.wire.spans import check_spans
from opd.wire.types import PayloadKind
from teacher_server.engines.base import EngineInfo, EngineItem


def check_batch(info: EngineInfo, batch: Sequence[EngineItem]) -> None:
    """Refuse items that this engine cannot score exactly.

    Raises:
        InvalidRequestError: naming the item's index, the value and the limit.
    """
    for index, entry in enumerate(batch):
        _check_payload(info, entry, index)
        _check_ids(info, entry, index)


def _check_payload(info: EngineInfo, entry: EngineItem, index: int) -> None:
    spec = entry.spec
    if spec.kind not in info.payloads:
        served = ", ".join(sorted(info.payloads))
        raise InvalidRequestError(f"sequence {index}: {info.engine} does not serve payload {spec.kind}; use {served}.")
    if spec.k > info.max_k:
        raise InvalidRequestError(
            f"sequence {index}: k is {spec.k}, but teacher {info.model} serves at most {info.max_k}; ask for fewer ids."
        )
    if not entry.temperature > 0:
        raise InvalidRequestError(f"sequence {index}: temperature is {entry.temperature}, but it must be above 0.")
    if entry.temperature != 1.0 and not info.supports_temperature and spec.kind is not PayloadKind.HIDDEN:
        raise InvalidRequestError(
            f"sequence {index}: {info.engine} scores at temperature 1 only, not {entry.temperature}; use temperature 1 "
            "or another engine."
        )


def _check_ids(info: EngineInfo, entry: EngineItem, index: int) -> None:
    item = entry.item
    length, prompt = len(item.token_ids), item.prompt_length
    if not 1 <= prompt < length:
        raise InvalidRequestError(
            f"sequence {index}: prompt_length is {prompt} of {length} tokens, but prompt and response need at least "
            "one token each."
        )
    if length > info.max_sequence_tokens:
        raise InvalidRequestError(
            f"sequence {index} has {length} tokens, but teacher {info.model} takes at most {info.max_sequence_tokens}; "
            "shorten it."
        )
    # Lengths before ids, and ids before spans: each check relies on the ones before it.
    for name, ids in (("token_ids", item.token_ids), ("gather_ids", item.gather_ids)):
        if ids is not None and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < info.vocab_size:
            raise InvalidRequestError(
                f"sequence {index}: {name} range from {ids.min()} to {ids.max()}, but teacher {info.model} has the ids "
                f"0 to {info.vocab_size - 1}."
            )
    if item.spans and not info.spans:
        raise InvalidRequestError(f"sequence {index}: {info.engine} scores whole responses only; leave the spans out.")
    check_spans(index, item)
    if entry.spec.kind is PayloadKind.GATHER:
        shape = None if item.gather_ids is None else item.gather_ids.shape
        if shape != (item.scored_length, entry.spec.k):
            raise InvalidRequestError(
                f"sequence {index}: gather_ids have shape {shape}, but payload gather with k {entry.spec.k} needs "
                f"({item.scored_length}, {entry.spec.k})."
            )
