"""Who is served when all want more than there is: principals share alike, however many names one of them goes by."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from waiting import EngineGate, until

from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec

SAMPLED = PayloadSpec.sampled()
BEARER = {name: (("authorization", f"Bearer {name}-secret-123"),) for name in ("student", "other")}


async def test_a_new_client_name_for_every_call_gains_nothing(start: Any, items: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("".join(f"- {{name: {name}, token: {name}-secret-123}}\n" for name in BEARER))
    limits = {"max_tokens_in_flight": 2000, "max_request_tokens": 2000, "max_batch_tokens": 100}
    client = await start(security_={"tokens": tokens}, limits=limits)
    asked = {name: items(1, rows=96, seed=seed) for seed, name in enumerate(BEARER)}  # of 100 tokens: a batch each
    gate, scored = EngineGate(), []

    def before(batch: Any) -> None:
        (entry,) = batch
        scored.extend(who for who, own in asked.items() if np.array_equal(entry.item.token_ids, own[0].token_ids))
        gate(batch)

    client.engines["numpy"].before_score = before
    worker = client.server.shared.teachers.get("t").worker

    async def call(who: str, name: str) -> str:
        message = build_score_request(asked[who], SAMPLED, teacher="t", request_id="r", client=name)
        try:
            answers = [answer async for answer in client.stub.Score(message, timeout=240, metadata=BEARER[who])]
            return f"{who}: {len(answers) > 0}"
        except grpc.RpcError as error:
            return f"{who}: {error.code().name}"

    flood = [asyncio.create_task(call("other", f"name{number}")) for number in range(40)]
    await until(lambda: sum(one.done() for one in flood) == 25)  # three quarters of the budget hold 15 of them
    steady = [asyncio.create_task(call("student", "steady")) for _ in range(8)]
    await until(lambda: sum(one.done() for one in steady) == 3)  # and the rest five more
    await until(lambda: gate.held == 1 and worker.load()[0] == 15 + 5 - 1)
    gate.open()
    ended = [await one for one in flood + steady]
    assert {said: ended.count(said) for said in ended} == {
        "other: True": 15,
        "other: RESOURCE_EXHAUSTED": 25,
        "student: True": 5,
        "student: RESOURCE_EXHAUSTED": 3,
    }
    # From its first turn on the student has every second one; among names it would have one in fourteen.
    last = max(turn for turn, who in enumerate(scored) if who == "student")
    assert len(scored) == 20 and last <= 1 + 2 * 5, scored
    await client.settled()
