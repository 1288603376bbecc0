"""A scheduler of the fleet whose clock and answers the test drives."""

import numpy as np

from opd.fleet.scheduling.in_flight import Rpc, ScoreTask
from opd.fleet.scheduling.scheduler import Scheduler
from opd.fleet.settings import CallSettings
from opd.wire.types import PayloadSpec, ScoreItem

PAYLOADS = {"topk": PayloadSpec.topk(4), "sampled": PayloadSpec.sampled()}


class World:
    """A scheduler with a hand-driven clock; numbers the rows."""

    def __init__(self, servers: int = 1, teachers: tuple[str, ...] = ("t",), **limits: int) -> None:
        self.scheduler = Scheduler(CallSettings.model_validate(limits))
        self.now = 0.0
        self.count = 0
        for i in range(servers):
            self.scheduler.serve(self.scheduler.add_server(f"s{i}"), teachers)

    def row(self, tokens: int, teacher: str = "t", group: str = "", payload: str = "sampled") -> ScoreTask:
        self.count += 1
        item = ScoreItem(np.zeros(tokens, np.uint32), 1)
        task = ScoreTask(self.count, teacher, item, PAYLOADS[payload], group=group, submitted=self.now)
        self.scheduler.submit(task)
        return task

    def plan(self) -> list[Rpc]:
        return self.scheduler.plan(self.now)

    def answer(self, rpc: Rpc, seconds: float) -> None:
        self.now += seconds
        for task in rpc.tasks:
            self.scheduler.answered(rpc, task, self.now)
            task.done = True
        assert self.scheduler.ended(rpc, self.now) == []


def grown(world: World) -> World:
    """The same, its servers' windows open as after many answers."""
    for server in world.scheduler.servers.values():
        server.window = 1e6
    return world


def tokens(rpc: Rpc) -> list[int]:
    return [task.tokens for task in rpc.tasks]
