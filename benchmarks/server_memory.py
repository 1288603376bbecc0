"""Memory: a server under the largest legal requests must stay within what its budgets state, and give it back.

    python benchmarks/server_memory.py                 # about three minutes
    python benchmarks/server_memory.py --seconds 60

Three tokens with 20 connections each send requests without a pause, and ignore when the server tells them to retry.
Beyond its resident memory at rest, a server may take the requests that it receives (`calls.receive_budget_bytes`) and
what its accepted requests hold (`limits.max_reply_bytes_in_flight`), and no more. Ten seconds after the last call most
of it must be back. Exits with 1 if it is not so.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from opd.wire.channel import open_channel
from opd.wire.request import build_score_request
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from support.server import CONSTANT_ENGINE, running_server
from teacher_server.settings import ServerSettings

TOKENS = ("one", "two", "three")
CONNECTIONS = 60
LEFT = 256 * 2**20
"""Bytes above rest that may be left ten seconds after the last call."""
SCORE = "/opd.wire.v1.TeacherService/Score"


def request(spec: PayloadSpec, sequences: int, rows: int) -> bytes:
    """A serialised request with prompts of one token."""
    rng = np.random.default_rng(0)
    ids = np.tile(np.arange(spec.k, dtype=np.uint32), (rows, 1)) if spec.kind is PayloadKind.GATHER else None
    items = [ScoreItem(rng.integers(0, 1000, rows + 1).astype(np.uint32), 1, ids) for _ in range(sequences)]
    return build_score_request(items, spec, teacher="t", request_id="r").SerializeToString()


def loads() -> dict[str, list[bytes]]:
    """The requests of each load."""
    gather = request(PayloadSpec.gather(250), 30, 511)
    packed = request(PayloadSpec.gather(1024), 24, 511)
    wide = request(PayloadSpec.topk(1024), 30, 511)
    hidden = request(PayloadSpec.hidden(), 30, 511)
    small = request(PayloadSpec.sampled(), 8, 511)
    return {
        "gather": [gather],
        "large gather": [packed],
        "top-k": [wide],
        "hidden": [hidden],
        "mixed": [gather, packed, wide, hidden, small],
    }


async def drive(address: str, messages: list[bytes], seconds: float, outcomes: Counter[str]) -> None:
    """Send the messages in turn on every connection, until the time is up."""
    end = time.monotonic() + seconds

    async def run(number: int) -> None:
        metadata = (("authorization", f"Bearer benchmark-token-{TOKENS[number % len(TOKENS)]}"),)
        async with open_channel(address) as channel:
            count = number
            while time.monotonic() < end:
                count += 1
                call = channel.unary_stream(SCORE)(messages[count % len(messages)], metadata=metadata, timeout=60)
                try:
                    while await call.read() is not grpc.aio.EOF:
                        if count % 7 == 0:
                            await asyncio.sleep(0.05)
                        if count % 11 == 0:
                            call.cancel()
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[error.code().name] += 1
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    outcomes["left"] += 1

    await asyncio.gather(*(run(number) for number in range(CONNECTIONS)))


async def watched(process: psutil.Process, work: Any) -> int:
    """Await some work; the most resident bytes in the meantime."""
    peak, task = 0, asyncio.ensure_future(work)
    while not task.done():
        peak = max(peak, process.memory_info().rss)
        await asyncio.sleep(0.05)
    await task
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", help="one of the loads")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = ServerSettings()
    allowed = settings.limits.max_reply_bytes_in_flight + settings.calls.receive_budget_bytes
    table, mib = [], 2**20
    print(f"allowed above rest {allowed // mib} MiB, left {LEFT // mib} MiB")
    print(f"{'load':>12} {'rest':>6} {'peak':>6} {'+10 s':>6} MiB")
    for name, messages in loads().items():
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            tokens = Path(folder) / "tokens.yaml"
            tokens.write_text(
                "".join(f"- {{name: {t}, token: benchmark-token-{t}, scopes: [score]}}\n" for t in TOKENS)
            )
            flags = (*CONSTANT_ENGINE, "--metrics-port", "-1", "--log-level", "error", "--tokens", str(tokens))
            flags += ("--engine-option", "seconds_per_token=1e-5", "--engine-option", "fresh=true")
            with running_server(Path(folder) / "port", *flags) as (popen, (address, *_)):
                process, outcomes = psutil.Process(popen.pid), Counter()
                asyncio.run(drive(address, [request(PayloadSpec.sampled(), 8, 511)], 2.0, Counter()))
                time.sleep(3)
                rest = process.memory_info().rss
                peak = asyncio.run(watched(process, drive(address, messages, args.seconds, outcomes)))
                time.sleep(10)
                left = process.memory_info().rss
        row = {"load": name, "rest": rest // mib, "peak": (peak - rest) // mib, "left": (left - rest) // mib}
        table.append({**row, "outcomes": dict(outcomes)})
        print(f"{name:>12} {row['rest']:6} {row['peak']:+6} {row['left']:+6} {dict(outcomes)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")
    if any(row["peak"] * mib > allowed or row["left"] * mib > LEFT for row in table):
        raise SystemExit("the server took more than its budgets state, or kept it")


if __name__ == "__main__":
    main()
