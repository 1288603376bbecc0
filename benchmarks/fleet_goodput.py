"""Rows per second through `TeacherFleet` and through stock gRPC channels, on the same servers with one of them slow.

    python benchmarks/fleet_goodput.py                            # four servers, one of a third of the speed
    python benchmarks/fleet_goodput.py --slow 1 --latency 0.3     # one with 0.3 s more latency per call

Real server processes with an engine of fixed pace. The same rows, four per call, go through three clients in turn,
round after round (interleaved, so that a busy machine hits all of them): `TeacherFleet`; one grpc.aio channel over
"ipv4:a,b,c,d" with the policy round_robin; the same with pick_first. Stock clients start all calls at once, as a
program that leaves balancing to gRPC does. Every answer is decoded and validated in all three. Printed: the median of
the rounds, and ratios to TeacherFleet within the run.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc.aio
import numpy as np
from fleet_servers import ServerProcess

from opd.fleet.client import TeacherFleet
from opd.wire.bounds import RequestBounds
from opd.wire.channel import channel_options
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1.teacher_pb2_grpc import TeacherServiceStub

SPEC = PayloadSpec.topk(16)
SERVERS, ROWS_PER_CALL = 4, 4


def draw_rows(count: int) -> list[ScoreItem]:
    """Rows of log-normal length (median 200 tokens, sigma 0.6), half of each prompt."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(200), 0.6, count), 16, 2000).astype(int)
    return [ScoreItem(rng.integers(0, 1000, n).astype(np.uint32), int(n) // 2) for n in lengths]


def through_grpc(addresses: Sequence[str], rows: Sequence[ScoreItem], policy: str) -> None:
    """Score all rows over one channel that balances by `policy`."""

    async def run() -> None:
        config = json.dumps({"loadBalancingConfig": [{policy: {}}]})
        options = [*channel_options(), ("grpc.service_config", config)]
        async with grpc.aio.insecure_channel(f"ipv4:{','.join(addresses)}", options=options) as channel:
            stub = TeacherServiceStub(channel)
            info = (await stub.Describe(pb.DescribeRequest())).teachers[0]
            bounds = RequestBounds.from_info(info)

            async def call(items: Sequence[ScoreItem]) -> None:
                decoder = ScoreStreamDecoder(items, SPEC, bounds)
                async for message in stub.Score(build_score_request(items, SPEC, teacher="t", request_id="r")):
                    decoder.feed(message)
                decoder.finish()

            parts = [rows[start : start + ROWS_PER_CALL] for start in range(0, len(rows), ROWS_PER_CALL)]
            await asyncio.gather(*(call(part) for part in parts))

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=3.0, help="factor by which the first server is slower")
    parser.add_argument(
        "--latency", type=float, default=0.0, help="seconds by which every call to the first server is delayed as well"
    )
    parser.add_argument("--seconds-per-token", type=float, default=1e-4)
    arguments = parser.parse_args()
    rows = draw_rows(arguments.rows)
    slow = ("--fault", f"latency={arguments.latency}s")
    pace = arguments.seconds_per_token
    with tempfile.TemporaryDirectory() as folder:
        first = ServerProcess(Path(folder) / "0", pace * arguments.slow, *(slow if arguments.latency else ()))
        servers = [first, *(ServerProcess(Path(folder) / str(i), pace) for i in range(1, SERVERS))]
        try:
            for server in servers:
                server.wait()
            seconds = measure([server.address for server in servers], rows, arguments.rounds)
        finally:
            for server in servers:
                server.kill()
    speed = {name: len(rows) / statistics.median(found) for name, found in seconds.items()}
    spread = {name: [round(min(found), 2), round(max(found), 2)] for name, found in seconds.items()}
    ideal = len(rows) / (sum(len(row.token_ids) for row in rows) * pace / (SERVERS - 1 + 1 / arguments.slow))
    result: dict[str, object] = {"rows": len(rows), "rounds": arguments.rounds}
    result |= {"slow": arguments.slow, "latency_seconds": arguments.latency}
    result |= {"rows_per_second": {name: round(value, 1) for name, value in speed.items()}}
    result |= {"seconds_min_max": spread, "share_of_engines": round(speed["fleet"] / ideal, 2)}
    result |= {"fleet_over": {name: round(speed["fleet"] / value, 2) for name, value in speed.items()}}
    print(json.dumps(result))


def measure(addresses: list[str], rows: Sequence[ScoreItem], rounds: int) -> dict[str, list[float]]:
    """Seconds of every client and round; one round before to warm up. The slow server is listed first."""
    with TeacherFleet.connect(addresses) as fleet:
        ways: dict[str, Callable[[], object]] = {
            "fleet": lambda: fleet.score("t", rows, SPEC),
            "round_robin": lambda: through_grpc(addresses, rows, "round_robin"),
            "pick_first": lambda: through_grpc(addresses[1:] + addresses[:1], rows, "pick_first"),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                begin = time.monotonic()
                way()
                if turn:
                    seconds[name].append(time.monotonic() - begin)
    return seconds


if __name__ == "__main__":
    main()
