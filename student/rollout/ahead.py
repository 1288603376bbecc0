"""Sampling ahead (`train.max_staleness: k`): the rows of a step are sampled while earlier steps are still learnt from.

    steps done           n                         n + 1
    learner thread    launch n+k | learn n ......  launch n+k+1 | learn n+1 ...
    sampler thread    ... sample n+k, with the weights after n steps ...

Step n is always sampled with exactly the weights after n - k steps (the first k steps with the initial weights), and by
the plan that the methods made then. The lag does not depend on which thread is faster, so a run is reproducible, and a
resumed run equals the uninterrupted one bit for bit. A checkpoint holds the plans of the steps under way and the
weights to sample them with; a resumed run samples them again. At the end of a run nothing is under way: if it is
resumed with more steps, the first k + 1 of these are all sampled with the weights at that end.

The thread only samples and submits. Planning, waiting for scores, rewards and all communication between ranks stay in
the learner's thread. Sampling ahead costs k + 1 copies of the trained tensors in host memory and, if the engine has no
weights of its own (trait `holds_weights`), one copy on the device. If the student is sharded and the engine
gathers shards itself (`takes_shards`), each rank keeps copies of its shards, and the engine takes the weights when a
step is launched.
"""

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from transformers import PreTrainedModel

from opd.errors import CancelledError, CheckpointError
from student.data.plan import PlannedRow, StepPlan
from student.data.row import Row
from student.data.states import plan_from_state, plan_to_state
from student.learning.learner import Learner
from student.model.ranks import Ranks
from student.model.sharding import full, placed
from student.rollout.engine import OnRow, PackedWeights, RolloutEngine
from student.rollout.episodes import EpisodePlayer
from student.rollout.policy_sampler import sample_or_play

_POLL_SECONDS = 0.5
_GATE_SECONDS = 0.02
_DONE = "steps sampled"
Lend = Callable[[], AbstractContextManager[RolloutEngine]]
Pack = Callable[[Mapping[str, Tensor], int], PackedWeights]
"""Has the engine take weights with their version (steps trained), on all ranks together."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a step, and when the thread sampled them.

    Attributes:
        rows: the rows, in the order of this rank's share of the plan.
        begin, sent, end: `time.monotonic()` at the start, when the first row was finished, and at the end; seconds.
        idle: seconds for which the thread had nothing to sample before this step.
    """

    rows: list[Row]
    begin: float
    sent: float
    end: float
    idle: float


@dataclass(slots=True)
class _UnderWay:
    """A step that was launched and is not yet learnt from.

    Attributes:
        plan: the plan of all ranks.
        version: number of steps that the weights it is sampled with have been trained for.
        rows: its rows, once they are sampled.
    """

    plan: StepPlan
    version: int
    rows: Future[Sampled]


class Gate:
    """Keeps ranks on the same step when they sample ahead from shared servers, which hold one version of the weights.

    A rank that has finished a step may start the next one only when all ranks have finished: otherwise the weights of
    the next step would replace those with which the others still sample, and their rows would have to be requested
    again. The threads must leave collectives to the loop, and a waiting thread must be able to give up, so they use
    counters in a store. All ranks construct it together.

    Args:
        ranks: all ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        host, main = os.environ.get("MASTER_ADDR", "127.0.0.1"), ranks.index == 0
        self._count, self._mine = ranks.count, 0
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if main else None
        port = ranks.gather(None if store is None else store.port)[0]
        self._store = store or TCPStore(host, int(port or 0), is_master=False, wait_for_workers=False)

    def wait(self, given_up: Callable[[], bool]) -> None:
        """Wait until all ranks have sampled as many steps as this one, or `given_up` returns True."""
        # Adding 0 reads the count; `get` would block until the key is set and could not give up.
        while not given_up() and self._store.add(_DONE, 0) < self._mine * self._count:
            time.sleep(_GATE_SECONDS)

    def done(self) -> None:
        """Record that this rank has sampled a step."""
        self._mine += 1
        self._store.add(_DONE, 1)


class Ahead:
    """Samples steps in a thread, up to `staleness` steps before the learner reaches them.

    Args:
        staleness: k, at least 1.
        steps: number of steps of the run; later ones are not launched.
        learner: gives the weights and the ranks.
        lend: lends the engine, which holds weights of its own, for one step.
        player: plays the rows that are episodes; used by this thread only.
        on_row: called in the thread with each row as soon as it is finished.
        asks: whether `on_row` asks models; otherwise they are asked when the rows are taken.
        on_end: called in the thread once all rows of a step are finished.
        pack: given if shards are kept: has the engine take them, in the loop's thread. None if whole tensors are kept.
        gate: makes all ranks sample the same step at the same time; None if each may proceed by itself.
    """

    def __init__(
        self,
        staleness: int,
        steps: int,
        learner: Learner,
        lend: Lend,
        player: EpisodePlayer,
        on_row: OnRow,
        on_end: Callable[[], None] = lambda: None,
        *,
        asks: bool = False,
        pack: Pack | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._staleness, self._steps = staleness, steps
        self._learner, self._lend, self._player = learner, lend, player
        self._on_row, self._on_end, self.asks = on_row, on_end, asks
        self._pack, self._gate = pack, gate
        self._packed: dict[int, PackedWeights] = {}  # by version
        self._under_way: dict[int, _UnderWay] = {}
        self._weights: dict[int, dict[str, Tensor]] = {}  # by version, on the host unless they are shards
        # One thread: steps are sampled in the order in which they were launched, with one engine.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sample-ahead")
        self._threads = torch.get_num_threads()
        device = learner.accelerator.device
        # A stream of its own lets kernels of both threads overlap; one for the run, as torch caches memory per stream.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: float | None = None
        self._closing = False

    def due(self, step: int) -> range:
        """The steps to plan and launch once `step` steps are done, in order."""
        first = max([step, *(launched + 1 for launched in self._under_way)])
        return range(first, min(step + self._staleness + 1, self._steps))

    def launch(self, plan: StepPlan, version: int) -> None:
        """Have a step sampled with the current weights, those after `version` steps; all ranks call it together."""
        self._start(plan, version, self._snapshot(version))

    def plan(self, step: int) -> StepPlan:
        """The plan of all ranks with which a step was launched."""
        return self._under_way[step].plan

    def weights(self, step: int) -> tuple[int, Mapping[str, Tensor]]:
        """The weights that a step under way is sampled with: their version, and the tensors by name."""
        version = self._under_way[step].version
        return version, self._weights[version]

    def take(self, step: int, planned: Sequence[PlannedRow], poll: Callable[[], None]) -> Sampled:
        """Wait for the rows of a step.

        Args:
            step: a step that was launched.
            planned: the rows of the strategy's first round: this rank's share of the plan, and possibly more.
            poll: called about twice a second; may raise to give up.

        Raises:
            OpdError: if sampling the step failed.
        """
        # The rows follow the plan that was made at launch; a strategy that asks for other rows must not get these.
        asked = {row.key: row for row in planned}
        if any(asked.get(row.key) != row for row in self._share(self.plan(step))):
            raise RuntimeError(
                f"the rows that were sampled ahead for step {step} are not the rows that the step asks for."
            )
        future = self._under_way[step].rows
        while not wait([future], timeout=_POLL_SECONDS).done:
            poll()
        return future.result()

    def done(self, steps: int) -> None:
        """Drop the plans and weights that only the first `steps` steps needed, which are learnt from."""
        self._under_way = {step: launched for step, launched in self._under_way.items() if step >= steps}
        needed = {launched.version for launched in self._under_way.values()}
        self._weights = {version: tensors for version, tensors in self._weights.items() if version in needed}
        for version in self._packed.keys() - needed:
            self._packed.pop(version).drop()

    def close(self) -> None:
        """Stop sampling at the end of the next row, and wait for the thread."""
        self._closing = True
        self._pool.shutdown(cancel_futures=True)

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Plans and weights of the steps under way, without the weights after `steps`, which are the checkpoint's."""
        under_way = [{"version": o.version, "plan": plan_to_state(o.plan)} for o in self._under_way.values()]
        old = {str(version): tensors for version, tensors in self._weights.items() if version != steps}
        return {"under_way": under_way, "weights": old}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Start sampling what was under way again; the learner holds the weights after `steps` steps.

        Raises:
            CheckpointError: if the state belongs to another student.
        """
        names = {name for name, _ in self._learner.named_parameters()}
        for launched in state["under_way"]:
            version = int(launched["version"])
            tensors = state["weights"].get(str(version)) if version != steps else self._snapshot(steps)
            if tensors is None or set(tensors) != names:
                raise CheckpointError(
                    f"the checkpoint's weights after {version} steps do not have the names of this student's trained "
                    "tensors; resume with the model that the checkpoint was written for."
                )
            here = dict(self._learner.named_parameters())
            keep = placed if self._pack is not None else _whole  # the saved tensors may be sharded differently
            self._weights[version] = {name: keep(tensor, here[name]) for name, tensor in tensors.items()}
            self._start(plan_from_state(launched["plan"]), version, self._weights[version])

    def _start(self, plan: StepPlan, version: int, weights: dict[str, Tensor]) -> None:
        if self._pack is not None and version not in self._packed:
            self._packed[version] = self._pack(weights, version)
        rows = self._pool.submit(self._sample, self._share(plan), version, weights)
        self._under_way[plan.step] = _UnderWay(plan, version, rows)

    def _share(self, plan: StepPlan) -> tuple[PlannedRow, ...]:
        ranks = self._learner.ranks
        return plan.shard(ranks.index, ranks.count).rows

    def _snapshot(self, version: int) -> dict[str, Tensor]:
        """A copy of the trained tensors on the host, or of this rank's shards; shared by all steps of this version."""
        if version not in self._weights and self._pack is not None:
            self._weights[version] = {name: p.detach().clone() for name, p in self._learner.named_parameters()}
        if version not in self._weights:
            parameters = self._learner.whole_parameters()
            self._weights[version] = {name: p.detach().to("cpu", copy=True) for name, p in parameters}
        return self._weights[version]

    def _sample(self, planned: tuple[PlannedRow, ...], version: int, weights: dict[str, Tensor]) -> Sampled:
        """Sample one step; runs in the thread."""
        torch.set_num_threads(self._threads)  # torch's setting is per thread
        begin = time.monotonic()
        idle = 0.0 if self._free is None else begin - self._free
        sent: list[float] = []

        def poll() -> None:
            if self._closing:
                raise CancelledError("the run has ended, so nothing more can be sampled ahead")

        def finished(row: Row) -> None:
            poll()
            sent.append(time.monotonic())
            self._on_row(row)

        if self._gate is not None:
            self._gate.wait(lambda: self._closing)
        # On a CPU the stream is None, which changes nothing.
        with torch.cuda.stream(self._stream), self._lend() as engine:
            if version in self._packed:
                self._packed[version].load()
            else:
                engine.sync(weights.items(), version)
            rows = sample_or_play(engine, self._player, planned, on_row=finished, poll=poll)
        self._on_end()
        if self._gate is not None:
            self._gate.done()
        self._free = time.monotonic()
        return Sampled(rows, begin, sent[0] if sent else self._free, self._free, idle)


def _whole(tensor: Tensor, like: Tensor) -> Tensor:
    return full(tensor)


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model for another thread: it has its own trained tensors and shares the memory of all others.

    Frozen parameters are separate objects over shared memory, because a rollout changes `requires_grad` flags of the
    copy (for autocast's cache) while `model` may be training.
    """
    shared: dict[int, Any] = {id(p): copy.copy(p) for p in model.parameters() if not p.requires_grad}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, shared)
