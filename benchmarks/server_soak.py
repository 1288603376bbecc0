"""Soak: a server under mixed load and abuse must not grow in memory, descriptors, threads or tasks.

    python benchmarks/server_soak.py                        # 15 minutes, `make soak`
    python benchmarks/server_soak.py --minutes 2 --leak     # the negative control: leaks on purpose, must be caught

Clients score all payloads, cancel at random, miss deadlines, send garbage, read slowly, and fetch loads. After a fifth
of the time as warm-up, resident memory may not rise by more than 10 MiB an hour (Theil-Sen slope, plus what sampling
noise allows), and descriptors, threads and tasks may not rise at all. Exits with 1 when something grew.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from support.server import CONSTANT_ENGINE, running_server

SPECS = [PayloadSpec.sampled(), PayloadSpec.topk(16), PayloadSpec.topk(64, "u16"), PayloadSpec.hidden()]
MAX_SLOPE_MIB_PER_HOUR = 10.0
LEAK_BYTES = 20_000


async def abuse(stub: Any, channel: Any, rng: random.Random) -> None:
    """One call of a kind drawn at random."""
    kind = rng.choice(["score"] * 6 + ["cancel", "deadline", "garbage", "slow", "load", "invalid"])
    rows = rng.choice([1, 30, 300])
    items = [ScoreItem(np.arange(rows + 4, dtype=np.uint32), 4) for _ in range(rng.randint(1, 6))]
    request = build_score_request(
        items, rng.choice(SPECS), teacher="t", request_id=f"{rng.random()}", client=f"c{rng.randint(0, 9)}"
    )
    if kind == "garbage":
        call = channel.unary_stream("/opd.wire.v1.TeacherService/Score")(rng.randbytes(rng.randint(0, 200)))
    elif kind == "load":
        await stub.GetLoad(pb.GetLoadRequest())
        return
    else:
        request.temperature = -1 if kind == "invalid" else 0
        call = stub.Score(request, timeout=0.002 if kind == "deadline" else 30)
    async for _ in call:
        if kind == "cancel":
            call.cancel()
        if kind == "slow":
            await asyncio.sleep(0.05)


async def clients(address: str, until: float, done: list[int]) -> None:
    async with open_channel(address) as channel:
        stub = teacher_pb2_grpc.TeacherServiceStub(channel)

        async def run(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < until:
                with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
                    await abuse(stub, channel, rng)
                done[0] += 1
                await asyncio.sleep(rng.random() * 0.1)

        await asyncio.gather(*(run(seed) for seed in range(8)))


def gauge(metrics_port: int, name: str) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30).read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


def sample(process: psutil.Process, metrics_port: int) -> dict[str, float]:
    return {
        "time": time.monotonic(),
        "rss": process.memory_info().rss / 2**20,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "tasks": gauge(metrics_port, "opd_teacher_tasks"),
    }


def slope(samples: list[dict[str, float]]) -> float:
    """Theil-Sen slope of resident memory, MiB per hour: the median over all pairs, robust to single peaks."""
    pairs = [
        (b["rss"] - a["rss"]) / (b["time"] - a["time"]) * 3600
        for i, a in enumerate(samples)
        for b in samples[i + 1 :]
        if b["time"] - a["time"] > 0.2 * (samples[-1]["time"] - samples[0]["time"])
    ]
    return statistics.median(pairs)


def verdict(samples: list[dict[str, float]]) -> list[str]:
    """What grew."""
    found = []
    hours = (samples[-1]["time"] - samples[0]["time"]) / 3600
    # Memory moves by a few MiB from sample to sample; over a short run that is a steep slope without a leak.
    noise = 4.0 / hours
    if slope(samples) > MAX_SLOPE_MIB_PER_HOUR + noise:
        found.append(f"memory: {slope(samples):.0f} MiB an hour")
    for name, slack in (("files", 4), ("threads", 1), ("tasks", 8)):
        half = len(samples) // 2
        first, second = (statistics.median(s[name] for s in part) for part in (samples[:half], samples[half:]))
        if second > first + slack:
            found.append(f"{name}: {first:.0f} to {second:.0f}")
    return found


async def soak(address: str, process: psutil.Process, metrics_port: int, seconds: float) -> list[dict[str, float]]:
    done = [0]
    started = time.monotonic()
    load = asyncio.create_task(clients(address, started + seconds, done))
    samples = []
    while not load.done():
        await asyncio.sleep(max(1.0, seconds / 120))
        samples.append(await asyncio.to_thread(sample, process, metrics_port))
    await load
    print(f"{done[0]} calls in {seconds:.0f} s")
    return [s for s in samples if s["time"] - started > seconds / 5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--leak", action="store_true", help="leak memory on purpose; exits with 0 if that is noticed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        leak = LEAK_BYTES if args.leak else 0
        flags = (*CONSTANT_ENGINE, "--log-level", "error", "--engine-option", f"leak={leak}")
        # One arena for all threads: otherwise memory that the allocator keeps looks like a leak.
        arena = {"MALLOC_ARENA_MAX": "1"}
        with running_server(Path(text) / "port", *flags, environment=arena) as (popen, (address, metrics_port, _)):
            process = psutil.Process(popen.pid)
            samples = asyncio.run(soak(address, process, int(metrics_port), args.minutes * 60))
    first, last = samples[0], samples[-1]
    for name in ("rss", "files", "threads", "tasks"):
        print(f"{name:8} {first[name]:8.1f} -> {last[name]:8.1f}")
    grown = verdict(samples)
    print(f"memory slope {slope(samples):.1f} MiB an hour; " + ("; ".join(grown) if grown else "nothing grew"))
    if popen.returncode != 0:
        sys.exit(f"the server ended with {popen.returncode}")
    sys.exit(0 if bool(grown) == args.leak else 1)


if __name__ == "__main__":
    main()
