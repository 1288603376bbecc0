"""How well the fleet's scheduler uses unequal replicas, and what scheduling costs.

    python benchmarks/fleet_makespan.py            # all tables, about a minute
    python benchmarks/fleet_makespan.py --quick    # fewer seeds

The real client code runs against simulated servers in virtual time (`support.simulation`). Rows are log-normal
(median 800 tokens, sigma 0.6). Ideal is total tokens / total speed, as if rows could be divided freely. The policies of
stock gRPC are computed on the same rows: round robin sends row i to server i mod n, pick first sends all to one server,
least assigned sends each row to the server with the fewest tokens assigned. Plain pull is the scheduler's rival: the
longest waiting row goes to whichever server has fewer than one (pull 1) or two (pull 2) rows, without estimates of
speeds or ends and without hedges. Our own columns are without cross-scoring, except the one that is named so.
"""

import argparse
import asyncio
import heapq
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from opd.fleet.scheduling import scheduler as scheduler_module
from opd.fleet.settings import FleetSettings, HealthSettings
from support.simulation import SimulatedServer, connect_simulated, draw_rows, run_virtual, score_batch

SPEED = 5000.0
NETWORK = 0.0005
"""Seconds one way, as the simulated servers have it."""


def ideal(rows: Sequence[int], speeds: Sequence[float]) -> float:
    return sum(rows) / sum(speeds)


def static(rows: Sequence[int], speeds: Sequence[float], choose: Callable[[int, list[float]], int]) -> float:
    """Makespan of a policy that assigns rows on arrival; `choose(i, tokens assigned)` names the server."""
    assigned = [0.0] * len(speeds)
    for index, tokens in enumerate(rows):
        assigned[choose(index, assigned)] += tokens
    return max(tokens / speed for tokens, speed in zip(assigned, speeds, strict=True))


def pull(rows: Sequence[int], speeds: Sequence[float], in_flight: int) -> float:
    """Makespan of plain longest-first pull with so many rows in flight per server, the network included."""
    waiting = sorted(rows)
    ready = [0.0] * len(speeds)  # when each server is done with what it has
    # (when a place at a server becomes free, in the eyes of the client; server)
    places = [(0.0, server) for _ in range(in_flight) for server in range(len(speeds))]
    heapq.heapify(places)
    end = 0.0
    while waiting:
        now, server = heapq.heappop(places)
        ready[server] = max(ready[server], now + NETWORK) + waiting.pop() / speeds[server]
        end = max(end, ready[server] + NETWORK)
        heapq.heappush(places, (ready[server] + NETWORK, server))
    return end


async def _ours(
    rows: Sequence[int], speeds: Sequence[float], batches: int, share: float
) -> tuple[list[float], dict[str, float]]:
    settings = FleetSettings(health=HealthSettings(check_seed=0, cross_score_share=share))
    servers = [SimulatedServer(f"s{i}:1", {"t": "w"}, speed) for i, speed in enumerate(speeds)]
    core = await connect_simulated(servers, settings)
    spans = []
    for _ in range(batches):
        span, _ = await score_batch(core, [("t", tokens) for tokens in rows])
        spans.append(span)
        await asyncio.sleep(30)
    counters = core.dispatcher.counters
    share = counters.hedges / counters.rows_submitted
    await core.close()
    return spans, {"hedges": share, "moved": counters.moved / counters.rows_submitted}


def makespan_table(seeds: int) -> list[dict[str, object]]:
    cases = {
        "8 equal": [SPEED] * 8,
        "8, each +-10 %": [SPEED * f for f in (0.9, 0.93, 0.96, 0.99, 1.01, 1.04, 1.07, 1.1)],
        "8, one 3x slow": [SPEED] * 7 + [SPEED / 3],
        "8, one 10x slow": [SPEED] * 7 + [SPEED / 10],
    }
    table: list[dict[str, object]] = []
    for name, speeds in cases.items():
        for count in (64, 256, 512):
            found: dict[str, list[float]] = {}
            for seed in range(seeds):
                rows = draw_rows(count, seed)
                best = ideal(rows, speeds)
                spans, more = run_virtual(_ours(rows, speeds, 3, 0.0))
                checked, _ = run_virtual(_ours(rows, speeds, 3, HealthSettings().cross_score_share))
                found.setdefault("first step", []).append(spans[0] / best)
                found.setdefault("later steps", []).append(statistics.mean(spans[1:]) / best)
                found.setdefault("cross-scored", []).append(statistics.mean(checked[1:]) / best)
                found.setdefault("hedged", []).append(more["hedges"])
                for places in (1, 2):
                    found.setdefault(f"pull {places}", []).append(pull(rows, speeds, places) / best)
                n = len(speeds)
                found.setdefault("round robin", []).append(static(rows, speeds, lambda i, _, n=n: i % n) / best)
                found.setdefault("pick first", []).append(static(rows, speeds, lambda i, _: 0) / best)
                least = static(rows, speeds, lambda _, assigned: int(np.argmin(assigned)))
                found.setdefault("least assigned", []).append(least / best)
            table.append(
                {"replicas": name, "rows": count} | {key: round(statistics.mean(v), 3) for key, v in found.items()}
            )
    return table


async def _large(replicas: int, teachers: int, rows: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    names = [f"t{i}" for i in range(teachers)]
    speeds = SPEED * rng.uniform(0.5, 1.5, replicas)
    servers = [SimulatedServer(f"s{i}:1", dict.fromkeys(names, "w"), speed) for i, speed in enumerate(speeds)]
    core = await connect_simulated(servers)
    lengths = draw_rows(rows, 1)
    work = [(names[i % teachers], tokens) for i, tokens in enumerate(lengths)]
    await score_batch(core, work)
    spent = {"plan": 0.0}
    plan = scheduler_module.Scheduler.plan

    def timed(self: scheduler_module.Scheduler, now: float) -> list[scheduler_module.Rpc]:
        start = time.thread_time()
        try:
            return plan(self, now)
        finally:
            spent["plan"] += time.thread_time() - start

    scheduler_module.Scheduler.plan = timed  # type: ignore[method-assign]
    start = time.process_time()
    span, _ = await score_batch(core, work)
    total = time.process_time() - start
    scheduler_module.Scheduler.plan = plan  # type: ignore[method-assign]
    await core.close()
    return {
        "replicas": replicas,
        "teachers": teachers,
        "rows": rows,
        "makespan/ideal": round(span / (sum(lengths) / float(sum(speeds))), 3),
        "scheduling, us per row": round(1e6 * spent["plan"] / rows, 1),
        "client and simulator, us per row": round(1e6 * total / rows, 1),
    }


def print_table(title: str, rows: list[dict[str, object]]) -> None:
    print(f"\n{title}\n")
    keys = list(rows[0])
    print("| " + " | ".join(keys) + " |")
    print("|" + "---|" * len(keys))
    for row in rows:
        print("| " + " | ".join(str(row[key]) for key in keys) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use 2 seeds instead of 10")
    parser.add_argument("--json", help="file to write the numbers to as well")
    arguments = parser.parse_args()
    spans = makespan_table(2 if arguments.quick else 10)
    print_table("Makespan divided by ideal, and share of rows hedged (means over seeds)", spans)
    scale = [run_virtual(_large(100, 10, 5000)), run_virtual(_large(8, 1, 5000)), run_virtual(_large(1000, 1, 4000))]
    print_table("Scale and cost of scheduling", scale)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"makespan": spans, "scale": scale}, file, indent=2)


if __name__ == "__main__":
    main()
