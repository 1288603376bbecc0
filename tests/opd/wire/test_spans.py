"""Parts of a response on the wire: asked for, encoded, decoded, and put back among those not asked for."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opd.errors import CorruptPayloadError, IncompatibleTeacherError, InvalidRequestError
from opd.wire.bounds import RequestBounds, check_items
from opd.wire.checksum import crc32c
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.encoder import chunk_messages, encode_scores
from opd.wire.request import build_score_request, parse_score_request, token_bytes
from opd.wire.spans import cut, put_back, spans_of, spans_to_bytes, whole
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb

SPANS = ((1, 3), (4, 5), (6, 9))
WANTED = [1, 2, 4, 6, 7, 8]
FIELDS = ("sampled", "values", "ids", "log_tail", "hidden", "logits")


def arrays(scores: Scores) -> dict[str, np.ndarray]:
    return {name: getattr(scores, name) for name in FIELDS if getattr(scores, name) is not None}


def partial(case: Any) -> ScoreItem:
    """The item of a case with ten response tokens, asked for at `SPANS`."""
    item = replace(case.item, spans=SPANS)
    return item if item.gather_ids is None else replace(item, gather_ids=item.gather_ids[WANTED])


def sent(item: ScoreItem, spec: PayloadSpec, bounds: RequestBounds) -> ScoreItem:
    """The item as a server reads it."""
    message = build_score_request([item], spec, teacher="t", request_id="r")
    return parse_score_request(pb.ScoreRequest.FromString(message.SerializeToString()), bounds).items[0]


@pytest.fixture
def able(bounds: RequestBounds) -> RequestBounds:
    return replace(bounds, spans=True)


def test_a_mask_becomes_runs_and_a_whole_one_none() -> None:
    mask = np.zeros(10, np.bool_)
    mask[WANTED] = True
    assert spans_of(mask) == SPANS
    assert spans_of(np.ones(4, np.bool_)) == ()
    assert spans_of(np.zeros(4, np.bool_)) == ((0, 1),)  # a request asks for something


def test_a_request_with_spans_carries_the_ids_of_its_positions_alone(
    case: Callable[..., Any], able: RequestBounds
) -> None:
    spec = PayloadSpec.gather(5)
    asked = case(spec, rows=10)
    item = partial(asked)
    found = sent(item, spec, able)
    assert found.spans == SPANS and found.scored_length == 6 and found.response_length == 10
    assert (found.gather_ids == asked.item.gather_ids[WANTED]).all()
    assert (found.scored_ids == asked.item.response_ids[WANTED]).all()
    sizes = [build_score_request([i], spec, teacher="t", request_id="r").ByteSize() for i in (item, asked.item)]
    assert sizes[1] - sizes[0] > 0


def test_every_payload_returns_the_numbers_of_the_asked_positions(
    spec: PayloadSpec, case: Callable[..., Any], able: RequestBounds
) -> None:
    asked = case(spec, rows=10)
    item = partial(asked)
    found = []
    for one, scores in ((asked.item, asked.scores), (item, cut(asked.scores, item))):
        encoded = encode_scores(scores, spec, one.scored_length, vocab_size=300, hidden_size=16)
        decoder = ScoreStreamDecoder([one], spec, able)
        decoder.feed(pb.ScoreResponse(header=pb.ScoreHeader(sequence_count=1)))
        decoder.feed(encoded.header(0, crc32c(token_bytes(one.token_ids))))
        for chunk in chunk_messages(encoded.buffers, 64):
            decoder.feed(pb.ScoreResponse(chunk=chunk))
        decoder.feed(pb.ScoreResponse(trailer=pb.ScoreTrailer()))
        found.append(decoder.finish()[0])
    everything, part = found
    assert part.wire_bytes < everything.wire_bytes
    back = put_back([(part, item, 0)], 10, asked.item.gather_ids)
    assert back.unasked == 4
    for name, array in arrays(everything).items():
        np.testing.assert_array_equal(arrays(part)[name], array[WANTED])
        filled = arrays(back)[name]
        assert filled.shape == array.shape and filled.dtype == array.dtype
        np.testing.assert_array_equal(filled[WANTED], array[WANTED])
        assert np.isfinite(np.delete(filled, WANTED, 0).astype(np.float64)).all()
    if everything.values is not None and back.log_tail is not None:
        mass = np.exp(back.values.astype(np.float64)).sum(1) + np.exp(back.log_tail)
        np.testing.assert_allclose(np.delete(mass, WANTED), 1.0, atol=2e-3)


@pytest.mark.parametrize("vocab", [300, 1 << 20])
@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_the_client_counts_the_bytes_that_travel(
    case: Callable[..., Any], bounds: RequestBounds, vocab: int, dtype: Any
) -> None:
    spec = PayloadSpec.gather(50)
    item = case(spec, rows=40).item
    shifted = item.gather_ids + (vocab - 300)
    item = replace(item, gather_ids=shifted.astype(dtype))
    roomy = replace(bounds, vocab_size=vocab, max_request_bytes=1 << 20)
    size = build_score_request([item], spec, teacher="t", request_id="r").ByteSize()
    check_items([item], spec, 1.0, replace(roomy, max_request_bytes=size))
    with pytest.raises(InvalidRequestError, match="bytes"):  # beside ids there are some bytes of names and lengths
        check_items([item], spec, 1.0, replace(roomy, max_request_bytes=size - 40))


def test_an_item_is_made_whole_with_distinct_ids_everywhere(case: Callable[..., Any], bounds: RequestBounds) -> None:
    spec = PayloadSpec.gather(5)
    asked = case(spec, rows=10)
    full = whole(partial(asked))
    check_items([full], spec, 1.0, bounds)
    assert full.spans == () and (full.gather_ids[WANTED] == asked.item.gather_ids[WANTED]).all()
    assert whole(asked.item) is asked.item and cut(asked.scores, asked.item) is asked.scores
    assert put_back([(asked.scores, asked.item, 0)], 10) is asked.scores


@pytest.mark.parametrize(
    "spans", [((3, 3),), ((2, 1),), ((0, 11),), ((0, 4), (3, 5)), ((4, 5), (0, 1)), ((10, 11),)], ids=str
)
def test_spans_that_make_no_sense_are_refused_by_both_sides(
    spans: Any, case: Callable[..., Any], able: RequestBounds
) -> None:
    spec = PayloadSpec.sampled()
    item = replace(case(spec, rows=10).item, spans=spans)
    with pytest.raises(InvalidRequestError, match=r"sequence 0: span \("):
        check_items([item], spec, 1.0, able)
    with pytest.raises(InvalidRequestError, match=r"sequence 0: span \("):
        sent(item, spec, able)


def test_half_a_span_and_spans_for_a_teacher_without_them_are_refused(
    case: Callable[..., Any], bounds: RequestBounds, able: RequestBounds
) -> None:
    spec = PayloadSpec.sampled()
    item = replace(case(spec, rows=10).item, spans=SPANS)
    message = build_score_request([item], spec, teacher="t", request_id="r")
    with pytest.raises(IncompatibleTeacherError, match="scores whole responses only"):
        parse_score_request(message, bounds)
    message.sequences[0].spans = message.sequences[0].spans[:-4]
    message.sequences[0].crc32c = 0
    with pytest.raises(InvalidRequestError, match="spans take 8 bytes each"):
        parse_score_request(message, able)


def test_spans_that_were_damaged_on_their_way_are_noticed(case: Callable[..., Any], able: RequestBounds) -> None:
    item = replace(case(PayloadSpec.sampled(), rows=10).item, spans=SPANS)
    message = build_score_request([item], PayloadSpec.sampled(), teacher="t", request_id="r")
    message.sequences[0].spans = spans_to_bytes(((0, 2), (4, 5), (6, 9)))
    with pytest.raises(CorruptPayloadError, match="checksum of token_ids"):
        parse_score_request(message, able)


def test_ids_for_another_number_of_positions_are_refused(case: Callable[..., Any], able: RequestBounds) -> None:
    spec = PayloadSpec.gather(5)
    item = replace(case(spec, rows=10).item, spans=SPANS)
    with pytest.raises(InvalidRequestError, match=r"response and k need \(6, 5\)"):
        check_items([item], spec, 1.0, able)
    assert spec.kind is PayloadKind.GATHER
