"""MB/s (10^6 bytes) from a server process to one client: score streams by chunk size, and Arrow Flight.

    python benchmarks/server_transport.py         # about a minute on two cores

The engine answers at once with prepared scores, so what is measured is encoding, checksums, transport, decoding and
every validation. "bare gRPC" streams the same bytes without any of those. Rounds are interleaved; the median is shown,
and ratios are to the default. Each call opens a connection of its own and asks for the description first.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from opd.wire.bounds import RequestBounds
from opd.wire.channel import open_channel
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from support.server import CONSTANT_ENGINE, running_server

ROWS, TOPK_ROWS, SEQUENCES = 1024, 8192, 8
HIDDEN, TOPK = PayloadSpec.hidden(), PayloadSpec.topk(64)
Way = Callable[[], Awaitable[int]]
MIB = 1 << 20
MB = 1_000_000


def scorer(address: str, *, spec: PayloadSpec = HIDDEN, chunk: int = 0) -> Way:
    """A call that scores and validates; returns bytes of tensors."""
    rng = np.random.default_rng(0)
    rows = ROWS if spec is HIDDEN else TOPK_ROWS
    items = [ScoreItem(rng.integers(0, 1000, 1 + rows).astype(np.uint32), 1) for _ in range(SEQUENCES)]

    async def run() -> int:
        async with open_channel(address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            bounds = RequestBounds.from_info((await stub.Describe(pb.DescribeRequest())).teachers[0])
            request = build_score_request(items, spec, teacher="t", request_id="r", chunk_bytes=chunk)
            decoder = ScoreStreamDecoder(items, spec, bounds)
            async for message in stub.Score(request):
                decoder.feed(message)
            return sum(scores.wire_bytes for scores in decoder.finish())

    return run


class Bare:
    """A gRPC server on a thread that streams bytes and nothing else."""

    def __init__(self, chunk: int) -> None:
        self._chunk = bytes(chunk)
        self._ready = threading.Event()
        self.port = 0
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait(30)

    async def _serve(self) -> None:
        server = grpc.aio.server()

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            for _ in range(total_bytes() // len(self._chunk)):
                yield self._chunk

        handlers = {"S": grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("b", handlers),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._ready.set()
        await server.wait_for_termination()

    async def run(self) -> int:
        """Read it all."""
        async with open_channel(f"127.0.0.1:{self.port}") as channel:
            count = 0
            async for data in channel.unary_stream("/b/S")(b""):
                count += len(data)
            return count


def flight() -> Way | None:
    """Arrow Flight with the same bytes, unchecked; None where it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.flight as pf
    except ImportError:
        return None
    rows = total_bytes() // 8 // SEQUENCES
    batch = pa.record_batch([pa.array(np.zeros(rows, np.float64))], names=["x"])

    class Server(pf.FlightServerBase):
        def do_get(self, context: Any, ticket: Any) -> Any:
            return pf.GeneratorStream(batch.schema, (batch for _ in range(SEQUENCES)))

    server = Server("grpc://127.0.0.1:0")
    client = pf.FlightClient(f"grpc://127.0.0.1:{server.port}")

    async def run() -> int:
        reader = client.do_get(pf.Ticket(b""))
        return sum(chunk.data.nbytes for chunk in reader)

    return run


def total_bytes() -> int:
    """What one call for hidden states carries: 4,096 bf16 per token."""
    return SEQUENCES * ROWS * 4096 * 2


def bytes_per_token(name: str) -> int:
    """What a token of a way takes: hidden states, or f16 values, ids, log-prob and tail."""
    if not name.startswith("topk"):
        return 4096 * 2
    return 64 * 2 + 64 * 32 // 8 + 8 if "32-bit" in name else 64 * 2 + 64 * 18 // 8 + 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        flags = (*CONSTANT_ENGINE, "--metrics-port", "-1")
        config = folder / "wide.yaml"
        config.write_text("transport: {pack_ids: false}\n")
        _, (address, *_) = stack.enter_context(running_server(folder / "port", *flags, quiet=True))
        wide = running_server(folder / "wide_port", *flags, "--config", str(config), quiet=True)
        _, (wide_address, *_) = stack.enter_context(wide)
        ways: dict[str, Way | None] = {
            f"hidden, {size // 1024} KiB chunks": scorer(address, chunk=size)
            for size in (64 * 1024, 256 * 1024, 512 * 1024, MIB, 4 * MIB)
        }
        ways["topk 64, 512 KiB chunks"] = scorer(address, spec=TOPK)
        ways["topk 64, 32-bit ids (pack_ids: false)"] = scorer(wide_address, spec=TOPK)
        ways["bare gRPC, 512 KiB chunks, no codec"] = Bare(512 * 1024).run
        ways["Arrow Flight, no codec"] = flight()
        times: dict[str, list[float]] = {}
        for _ in range(args.rounds + 1):
            for name, way in ways.items():
                if way is not None:
                    started = time.perf_counter()
                    count = asyncio.run(way())  # type: ignore[arg-type]
                    times.setdefault(name, []).append(count / MB / (time.perf_counter() - started))
    base = statistics.median(times["hidden, 512 KiB chunks"][1:])
    table = []
    print(f"{SEQUENCES} sequences per call; hidden states: {total_bytes() / MB:.0f} MB")
    print(f"{'':38} {'MB/s':>7} {'best':>7} {'x default':>9} {'1000 tokens/s':>14}")
    for name, rates in times.items():
        rate = statistics.median(rates[1:])
        tokens = rate * MB / bytes_per_token(name)
        row = {
            "name": name,
            "mb_per_second": rate,
            "best": max(rates),
            "ratio": rate / base,
            "tokens_per_second": tokens,
        }
        table.append(row)
        print(f"{name:38} {rate:7.0f} {max(rates):7.0f} {rate / base:9.2f} {tokens / 1000:14.0f}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
