"""Overload: goodput at four times the capacity against its peak, waits, memory, and what a refusal costs.

    python benchmarks/server_overload.py              # about a minute
    python benchmarks/server_overload.py --seconds 300

Closed-loop clients send one request after the other, and retry a refused one as the fleet's client does. The engine
takes a fixed time per token, so that the ratio is about queueing and not about this machine's speed.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import psutil

from opd.errors import OverloadedError
from opd.fleet.scheduling.budget import pushback_seconds
from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2_grpc
from support.server import CONSTANT_ENGINE, running_server

SEQUENCES, TOKENS = 8, 512
BUDGET = 16 * SEQUENCES * TOKENS
SECONDS_PER_TOKEN = 1e-5


@dataclass
class Load:
    """What a run of clients saw."""

    tokens: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)


async def drive(address: str, clients: int, seconds: float) -> Load:
    load = Load()
    rng = np.random.default_rng(0)
    items = [ScoreItem(rng.integers(0, 1000, TOKENS).astype(np.uint32), 128) for _ in range(SEQUENCES)]
    async with open_channel(address) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        started = time.monotonic()

        async def run(number: int) -> None:
            count = refusals = 0
            jitter = random.Random(number)
            while time.monotonic() - started < seconds:
                count += 1
                request = build_score_request(
                    items, PayloadSpec.sampled(), teacher="t", request_id=f"{number}.{count}", client=f"c{number}"
                )
                try:
                    async for message in stub.Score(request, timeout=60):
                        if message.WhichOneof("message") == "trailer":
                            load.waits.append(message.trailer.timings.queue_seconds)
                    load.tokens += SEQUENCES * TOKENS
                    load.outcomes["OK"] += 1
                    refusals = 0
                except grpc.RpcError as error:
                    typed = error_from_rpc(error)
                    load.outcomes[type(typed).__name__] += 1
                    if isinstance(typed, OverloadedError):
                        refusals += 1
                        await asyncio.sleep(pushback_seconds(typed.retry_after, refusals, jitter))

        await asyncio.gather(*(run(number) for number in range(clients)))
        load.seconds = time.monotonic() - started
    return load


async def refuse(address: str, process: psutil.Process, count: int) -> tuple[float, float]:
    """Milliseconds of a full server's processor time per refusal, and milliseconds that a caller waits for one."""
    rng = np.random.default_rng(0)
    items = [ScoreItem(rng.integers(0, 1000, TOKENS).astype(np.uint32), 128) for _ in range(SEQUENCES)]
    request = build_score_request(items, PayloadSpec.sampled(), teacher="t", request_id="r")
    async with open_channel(address) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        running = stub.Score(request)
        filling = asyncio.ensure_future(running.read())
        refused = 0

        async def ask() -> bool:
            try:
                await stub.Score(request, timeout=60).read()
            except grpc.RpcError as error:
                return isinstance(error_from_rpc(error), OverloadedError)
            return False

        await asyncio.sleep(1.0)
        times, began = process.cpu_times(), time.perf_counter()
        for _ in range(count):
            refused += await ask()
        seconds = time.perf_counter() - began
        spent = process.cpu_times()
        if refused < count or filling.done():
            raise SystemExit(f"{count - refused} of {count} calls found room; the server was not full")
        running.cancel()
        await asyncio.gather(filling, return_exceptions=True)
    used = spent.user + spent.system - times.user - times.system
    return 1e3 * used / count, 1e3 * seconds / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "server.yaml"
        # Without tokens all clients of this host are one principal: it may have the whole budget.
        config.write_text("limits: {max_client_share: 1.0}\n")
        flags = (*CONSTANT_ENGINE, "--metrics-port", "-1", "--log-level", "error", "--config", str(config))
        flags += ("--max-tokens-in-flight", str(BUDGET), "--engine-option", f"seconds_per_token={SECONDS_PER_TOKEN}")
        with running_server(Path(folder) / "port", *flags) as (process, (address, *_)):
            asyncio.run(drive(address, 16, 2.0))
            table = []
            peak = 0.0
            print(f"{'clients':>8} {'tokens/s':>9} {'of peak':>8} {'refused':>8} {'p99 wait s':>10} {'RSS MiB':>8}")
            # 16 clients fill the budget exactly; 64 ask for four times as much.
            for clients in (8, 16, 64):
                load = asyncio.run(drive(address, clients, args.seconds))
                rate = load.tokens / load.seconds
                peak = max(peak, rate)
                resident = psutil.Process(process.pid).memory_info().rss / 2**20
                wait = float(np.quantile(load.waits, 0.99))
                refused = load.outcomes["OverloadedError"]
                untyped = sum(load.outcomes.values()) - load.outcomes["OK"] - refused
                row = {"clients": clients, "tokens_per_second": rate, "of_peak": rate / peak, "refused": refused}
                table.append({**row, "p99_wait": wait, "rss_mib": resident, "untyped_failures": untyped})
                print(
                    f"{clients:8} {rate:9.0f} {rate / peak:8.2f} {refused:8} {wait:10.2f} {resident:8.0f}", flush=True
                )
                if untyped:
                    raise SystemExit(
                        f"{untyped} calls failed with something other than a refusal: {dict(load.outcomes)}"
                    )
        full = (*flags[:-1], "seconds_per_token=0.005", "--max-tokens-in-flight", str(SEQUENCES * TOKENS), "--grace=0")
        with running_server(Path(folder) / "full", *full) as (process, (address, *_)):
            server, waited = asyncio.run(refuse(address, psutil.Process(process.pid), 1000))
        print(f"a refusal takes {server:.2f} ms of the server's processor time, and its caller {waited:.2f} ms")
    if args.json:
        cost = {"server_ms": server, "caller_ms": waited}
        args.json.write_text(json.dumps({"load": table, "refusal": cost}, indent=1) + "\n")


if __name__ == "__main__":
    main()
