"""Messages of one answer: several in one where they are short and the reader accepts that."""

from typing import Any

import grpc
import pytest

from opd.errors import UnavailableError
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec


async def kinds(client: Any, items: Any, spec: PayloadSpec, **options: Any) -> list[str]:
    """What each message of an answer holds; a batch's own are joined by a plus."""
    request = build_score_request(items, spec, teacher="t", request_id="r", **options)
    found = []
    async for answer in client.stub.Score(request, timeout=60.0):
        several = answer.batch.messages if answer.WhichOneof("message") == "batch" else [answer]
        found.append("+".join(one.WhichOneof("message") for one in several))
    return found


async def test_short_answers_travel_together_where_the_reader_accepts_that(start: Any, items: Any) -> None:
    client = await start()
    each = ["header", *["sequence", "chunk"] * 3, "trailer"]
    assert await kinds(client, items(3), PayloadSpec.topk(7)) == each
    # All three are handed to the engine at once, and so come out of it together.
    assert await kinds(client, items(3), PayloadSpec.topk(7), accept_batches=True) == ["+".join(each)]


async def test_long_answers_travel_by_themselves_and_nothing_waits_for_them(start: Any, items: Any) -> None:
    client = await start()
    asked = items(2, rows=2000)
    found = await kinds(client, asked, PayloadSpec.full(), accept_batches=True)
    assert "".join(f"{one}+" for one in found).count("sequence+") == 2
    assert sum(one == "chunk" for one in found) >= 2 and not any("chunk" in one and "+" in one for one in found)


async def test_what_was_scored_before_a_call_fails_is_delivered(start: Any, items: Any) -> None:
    client = await start()

    async def fail() -> None:
        raise UnavailableError("as asked")

    sent = []
    client.server.points.set("sequence_sent", fail)
    request = build_score_request(items(2), PayloadSpec.sampled(), teacher="t", request_id="r", accept_batches=True)
    with pytest.raises(grpc.aio.AioRpcError):
        async for answer in client.stub.Score(request, timeout=60.0):
            sent += [one.WhichOneof("message") for one in answer.batch.messages]
    assert sent == ["header", "sequence", "chunk"]
    await client.settled()
