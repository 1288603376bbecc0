"""Served scoring against the same engine in-process: tokens per second as a ratio, by payload and concurrency.

    python benchmarks/server_throughput.py            # about three minutes on two cores
    python benchmarks/server_throughput.py --quick    # one payload, fewer rounds

The model has Qwen3's architecture and random weights and is large enough for its forward to dominate. Both sides score
the same sequences with the same token budget per batch; the server is another process, reached over loopback. Rounds
alternate, and the median of the ratios is shown: of tokens per second, and of tokens per second of processor time (the
server's own), which other work on the cores does not change. "explained" is the share of a call's time at the client,
from request to last message, that the times in its trailer cover.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from opd.wire.bounds import RequestBounds
from opd.wire.channel import open_channel
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from support.models import SMALL, save_model
from support.server import running_server
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine

SHAPE = SMALL | {"num_hidden_layers": 6}
BATCH_TOKENS = 2048
SPECS = {
    "sampled": PayloadSpec.sampled(),
    "topk 64": PayloadSpec.topk(64),
    "gather 64": PayloadSpec.gather(64),
    "hidden": PayloadSpec.hidden(),
}


def make_items(count: int, k: int) -> list[ScoreItem]:
    rng = np.random.default_rng(0)
    items = []
    for _ in range(count):
        ids = rng.integers(0, SHAPE["vocab_size"], 32 + 224).astype(np.uint32)
        gather = np.argsort(rng.random((224, 512)), axis=1)[:, :k].astype(np.uint32) if k else None
        items.append(ScoreItem(ids, 32, gather))
    return items


def in_process(engine: Any, items: list[ScoreItem], spec: PayloadSpec) -> tuple[float, float]:
    """Tokens per second, of the clock and of the processor."""
    started, began = time.perf_counter(), time.process_time()
    per_batch = BATCH_TOKENS // len(items[0].token_ids)
    for at in range(0, len(items), per_batch):
        engine.score([EngineItem(item, spec) for item in items[at : at + per_batch]])
    tokens = sum(len(item.token_ids) for item in items)
    return tokens / (time.perf_counter() - started), tokens / (time.process_time() - began)


def busy_seconds(process: psutil.Process) -> float:
    """Processor time of all threads of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def served(
    address: str, server: psutil.Process, items: list[ScoreItem], spec: PayloadSpec, concurrency: int
) -> tuple[float, float, float]:
    """Tokens per second, of the clock and of the server's processor time; share of a call's time that is explained."""
    shares = []
    async with open_channel(address) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)
        info = (await stub.Describe(pb.DescribeRequest(teacher="t"))).teachers[0]
        bounds = RequestBounds.from_info(info)
        parts = [items[n::concurrency] for n in range(concurrency)]

        async def run(number: int) -> None:
            request = build_score_request(parts[number], spec, teacher="t", request_id=f"r{number}")
            decoder = ScoreStreamDecoder(parts[number], spec, bounds)
            asked = time.perf_counter()
            async for message in stub.Score(request):
                decoder.feed(message)
            t = decoder.finish()[0].timings
            told = t.admission + t.queue + t.batch_wait + t.engine + t.encode + t.send
            shares.append(told / (time.perf_counter() - asked))

        started, began = time.perf_counter(), busy_seconds(server)
        await asyncio.gather(*(run(number) for number in range(concurrency)))
        tokens = sum(len(item.token_ids) for item in items)
        seconds, busy = time.perf_counter() - started, busy_seconds(server) - began
    return tokens / seconds, tokens / busy, statistics.median(shares)


def measure(
    engine: Any,
    address: str,
    server: psutil.Process,
    items: list[ScoreItem],
    spec: PayloadSpec,
    calls: int,
    rounds: int,
) -> dict[str, float]:
    """Medians over rounds that alternate between both sides."""
    pairs = []
    for _ in range(rounds):
        own = in_process(engine, items, spec)
        pairs.append((own, asyncio.run(served(address, server, items, spec, calls))))
    return {
        "in_process": statistics.median(own[0] for own, _ in pairs),
        "served": statistics.median(other[0] for _, other in pairs),
        "ratio": statistics.median(other[0] / own[0] for own, other in pairs),
        "cpu_ratio": statistics.median(other[1] / own[1] for own, other in pairs),
        "explained": statistics.median(other[2] for _, other in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sequences", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds, names = (3, ["topk 64"]) if args.quick else (args.rounds, list(SPECS))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        save_model(folder / "model", SHAPE)
        engine = TransformersEngine(str(folder / "model"), device="cpu", max_batch_tokens=BATCH_TOKENS)
        flags = ("--model", f"t={folder / 'model'}", "--max-batch-tokens", str(BATCH_TOKENS))
        flags += ("--threads", "1", "--metrics-port", "-1", "--device", "cpu")
        table: list[dict[str, Any]] = []
        titles = ("calls at once", "in-process tok/s", "served", "ratio", "of CPU", "explained")
        print("{:12} {:>13} {:>17} {:>7} {:>6} {:>6} {:>9}".format("payload", *titles))
        with running_server(folder / "port", *flags, quiet=True) as (process, (address, *_)):
            server = psutil.Process(process.pid)
            for name in names:
                items = make_items(args.sequences, SPECS[name].k if name.startswith("gather") else 0)
                for calls in sorted({min(calls, args.sequences) for calls in (1, 4, 16)}):
                    row = measure(engine, address, server, items, SPECS[name], calls, rounds)
                    table.append({"payload": name, "concurrency": calls, **row})
                    print(
                        f"{name:12} {calls:13} {row['in_process']:17.0f} {row['served']:7.0f} {row['ratio']:6.2f} "
                        f"{row['cpu_ratio']:6.2f} {row['explained']:9.3f}",
                        flush=True,
                    )
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
