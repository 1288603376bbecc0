"""What a SIGKILL costs the calls that were on the killed server: latency added by the fail-over.

    python benchmarks/fleet_failover.py               # 32 kills, some minutes
    python benchmarks/fleet_failover.py --kills 4     # a look

Four server processes with an engine of fixed pace, one row per call, a closed loop that keeps hundreds of rows
submitted. One server after the other is killed while at least 100 calls are in flight, restarted, and used again
before the next dies. Printed in seconds, over all calls that were in flight on a killed server:

    added     first sending to answer, minus the median of the same for the untouched calls before that kill
    after     SIGKILL to answer: an upper bound of what the kill can have added
    resent    SIGKILL to the last sending to another server: detection, pause and waiting for room there
    untouched first sending to answer, minus the median, of the calls before the kill: what the machine adds anyway

Goal: p99 of added at most 1 s.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
from fleet_servers import ServerProcess, numbered_rows

from opd.fleet.client import TeacherFleet
from opd.fleet.membership.grpc_link import GrpcLink
from opd.fleet.membership.link import ReplicaRequest
from opd.fleet.settings import FleetSettings
from opd.wire.types import PayloadSpec, Scores

SERVERS, TOKENS = 4, 32


class Ledger:
    """Where each row is and was, by its number; written by the links, read by the killer."""

    def __init__(self) -> None:
        self.on: dict[str, set[int]] = {}
        self.first_sent: dict[int, float] = {}
        self.last_sent: dict[int, float] = {}
        self.answered: dict[int, float] = {}


class WatchedLink(GrpcLink):
    """A link that notes which rows are in flight on its server."""

    ledger: Ledger

    async def score(
        self, request: ReplicaRequest, timeout: float | None, idle: float
    ) -> AsyncGenerator[tuple[int, Scores], None]:
        # Comparisons of replicas are not rows.
        rows = [] if request.check else [int(item.token_ids[0]) for item in request.items]
        mine = self.ledger.on.setdefault(self.address, set())
        now = time.monotonic()
        for row in rows:
            self.ledger.first_sent.setdefault(row, now)
            self.ledger.last_sent[row] = now
        mine.update(rows)
        try:
            async for index, scores in super().score(request, timeout, idle):
                yield index, scores
        finally:
            mine.difference_update(rows)


class Load(threading.Thread):
    """Keeps `outstanding` rows submitted until it is stopped."""

    def __init__(self, fleet: TeacherFleet, ledger: Ledger, outstanding: int) -> None:
        super().__init__()
        self._fleet, self._ledger = fleet, ledger
        self._free = threading.Semaphore(outstanding)
        self.stop = threading.Event()
        self.failed: list[BaseException] = []
        self.futures: list[Future[Scores]] = []

    def run(self) -> None:
        """Submit."""
        rows = numbered_rows(150_000, TOKENS)
        for number, item in enumerate(rows):
            self._free.acquire()
            if self.stop.is_set():
                return
            future = self._fleet.submit("t", item, PayloadSpec.sampled())
            future.add_done_callback(partial(self._done, number))
            self.futures.append(future)

    def _done(self, number: int, done: Future[Scores]) -> None:
        self._ledger.answered[number] = time.monotonic()
        if done.exception() is not None:
            self.failed.append(done.exception())  # type: ignore[arg-type]
        self._free.release()


def healthy(fleet: TeacherFleet) -> int:
    return sum(replica.state == "healthy" for replica in fleet.status().replicas)


def in_flight(ledger: Ledger) -> int:
    return sum(len(rows) for rows in ledger.on.values())


def until(condition: object, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise SystemExit(f"gave up waiting for {what}")
        time.sleep(0.01)


def one_kill(fleet: TeacherFleet, ledger: Ledger, victim: ServerProcess) -> tuple[dict[str, list[float]], int]:
    """What each call on the victim lost, and how many calls were in flight in all."""
    until(lambda: healthy(fleet) == SERVERS and in_flight(ledger) >= 100 and ledger.on[victim.address], 300, "load")
    begin = time.monotonic()
    calm = [end - ledger.first_sent[row] for row, end in list(ledger.answered.copy().items())[-500:]]
    flying = in_flight(ledger)
    lost = set(ledger.on[victim.address])
    victim.kill()
    until(lambda: all(row in ledger.answered for row in lost), 300, "the calls of the killed server")
    usual = statistics.median(calm)
    # Calls that were answered before the signal took effect were not affected.
    ends = {row: ledger.answered[row] for row in lost if ledger.answered[row] > begin + 0.01}
    found = {
        "added": [end - ledger.first_sent[row] - usual for row, end in ends.items()],
        "after": [end - begin for end in ends.values()],
        "resent": [max(0.0, ledger.last_sent[row] - begin) for row in ends],
        "untouched": [seconds - usual for seconds in calm],
    }
    return found, flying


def summary(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(max(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=32)
    parser.add_argument("--outstanding", type=int, default=300, help="number of rows kept submitted at any time")
    parser.add_argument("--seconds-per-token", type=float, default=4e-4)
    arguments = parser.parse_args()
    ledger = Ledger()
    WatchedLink.ledger = ledger
    settings = FleetSettings.model_validate({"calls": {"rows": 1}})
    with tempfile.TemporaryDirectory() as folder:
        servers = [ServerProcess(Path(folder) / str(i), arguments.seconds_per_token) for i in range(SERVERS)]
        try:
            for server in servers:
                server.wait()
            measure(servers, ledger, settings, arguments)
        finally:
            for server in servers:
                server.kill()


def measure(
    servers: Sequence[ServerProcess], ledger: Ledger, settings: FleetSettings, arguments: argparse.Namespace
) -> None:
    """Kill and restart the servers in turn under load and print what it cost."""

    def link(address: str) -> WatchedLink:
        return WatchedLink(address, settings.security, settings.calls, "failover")

    costs: dict[str, list[float]] = {"added": [], "after": [], "resent": [], "untouched": []}
    flying: list[int] = []
    with TeacherFleet.connect([server.address for server in servers], settings=settings, link=link) as fleet:
        load = Load(fleet, ledger, arguments.outstanding)
        load.start()
        try:
            for kill in range(arguments.kills):
                victim = servers[kill % SERVERS]
                found, count = one_kill(fleet, ledger, victim)
                flying.append(count)
                worst = {name: round(max(values), 3) for name, values in found.items()}
                print(f"kill {kill}: {len(found['added'])} calls, at most {worst}", file=sys.stderr)
                for name, values in found.items():
                    costs[name] += values
                victim.start()
                victim.wait()
        finally:
            load.stop.set()
            load.join()
        fleet.wait(load.futures)
        counters = fleet.status().counters
    result: dict[str, object] = {"kills": arguments.kills, "least_calls_in_flight": min(flying)}
    result |= {"affected": len(costs["added"])} | {name: summary(values) for name, values in costs.items()}
    result |= {"rows": counters.rows_answered, "failed": counters.rows_failed, "reissues": counters.reissues}
    result |= {"hedges": counters.hedges, "p99_goal_met": float(np.percentile(costs["added"], 99)) <= 1.0}
    print(json.dumps(result))
    if load.failed or counters.rows_answered != counters.rows_submitted:
        raise SystemExit("rows were lost")


if __name__ == "__main__":
    main()
