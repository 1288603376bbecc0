"""Rollouts beside learning (`train.max_staleness: k`): the rows of a step are sampled while earlier steps are learnt.

    steps done           n                         n + 1
    learner thread    launch n+k | learn n ......  launch n+k+1 | learn n+1 ...
    sampler thread    ... sample n+k, with the weights after n steps ...

Step n is sampled with exactly the weights after n - k steps (the first k with the initial ones) and by the plan that
the methods made then, whatever takes longer: the lag is a number and no race, so a run is reproducible and a resumed
one is the uninterrupted one bit for bit. A checkpoint holds the plans of the steps under way and the weights that they
are sampled with, and a resumed run samples them again.

The thread does nothing but sample and submit: planning, waiting for scores, rewards and all that ranks tell each other
stay in the learner's thread. Costs k + 1 copies of the trained tensors in host memory, and where the engine has no
weights of its own (`RolloutEngine.holds_weights`) one on the device. Of a sharded student each rank keeps copies of its
shards, where the engine gathers them itself (`takes_shards`): it takes them when a step is launched.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from opd.errors import CancelledError, CheckpointError
from student.data.plan import PlannedRow, StepPlan
from student.data.plan_state import plan_from_state, plan_to_state
from student.data.row import Row
from student.learning.learner import Learner
from student.learning.sharding import full, placed
from student.rollout.engine import OnRow, PackedWeights, RolloutEngine, sample_or_play
from student.rollout.episodes import EpisodePlayer
from student.rollout.gate import Gate

_POLL_SECONDS = 0.5
Lend = Callable[[], AbstractContextManager[RolloutEngine]]
Pack = Callable[[Mapping[str, Tensor], int], PackedWeights]
"""Has the engine take weights, which have seen so many steps, from all ranks together."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rows of a step, and when the thread sampled them.

    Attributes:
        rows: in the order of this rank's share of the plan.
        begin, sent, end: `time.monotonic()` in seconds; at `sent` the first row was finished.
        idle: seconds that the thread had nothing to sample before it.
    """

    rows: list[Row]
    begin: float
    sent: float
    end: float
    idle: float


@dataclass(slots=True)
class _UnderWay:
    """A step that was launched and is not learnt yet.

    Attributes:
        plan: of all ranks.
        version: steps that the weights to sample with have seen.
        found: its rows.
    """

    plan: StepPlan
    version: int
    found: Future[Sampled]


class Ahead:
    """Samples up to `staleness` steps before the learner has come to them.

    Args:
        staleness: k, at least 1.
        steps: of the run; later ones are not launched.
        learner: whose weights and ranks these are.
        lend: gives the engine, which holds weights of its own, for the time of a step.
        player: plays the rows that are episodes; nothing else uses it.
        on_row: called in the thread with each row as soon as it is finished.
        on_end: called there when all rows of a step are.
        pack: where shards are kept, and the engine takes them in the loop's thread; None where whole tensors are.
        gate: has all ranks sample a step at the same time; None where each may go on by itself.
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
        pack: Pack | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._staleness, self._steps = staleness, steps
        self._learner, self._lend, self._player = learner, lend, player
        self._on_row, self._on_end = on_row, on_end
        self._pack, self._gate = pack, gate
        self._packed: dict[int, PackedWeights] = {}  # by version
        self._under_way: dict[int, _UnderWay] = {}
        self._weights: dict[int, dict[str, Tensor]] = {}  # by version, on the host unless they are shards
        # One thread: steps are sampled in the order in which they were launched, with one engine.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sample-ahead")
        self._threads = torch.get_num_threads()
        device = learner.accelerator.device
        # One for the whole run, so that the device can work on both threads' kernels: memory is kept for each stream.
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free: float | None = None
        self._closing = False

    def due(self, step: int) -> range:
        """The steps to plan and launch now that `step` steps are done, in their order."""
        first = max([step, *(launched + 1 for launched in self._under_way)])
        return range(first, min(step + self._staleness + 1, self._steps))

    def launch(self, plan: StepPlan, version: int) -> None:
        """Have a step sampled with the weights of now, which have seen `version` steps; all ranks do so together."""
        self._start(plan, version, self._snapshot(version))

    def plan(self, step: int) -> StepPlan:
        """The plan, of all ranks, that a step was launched with."""
        return self._under_way[step].plan

    def weights(self, step: int) -> tuple[int, Mapping[str, Tensor]]:
        """What a step that is not done is sampled with: steps that the weights have seen, and the tensors by name."""
        version = self._under_way[step].version
        return version, self._weights[version]

    def take(self, step: int, planned: Sequence[PlannedRow], poll: Callable[[], None]) -> Sampled:
        """Wait for the rows of a step.

        Args:
            step: a step that was launched.
            planned: what the strategy asks for first: this rank's share of its plan, and further rows.
            poll: called about twice a second; may raise to give up.

        Raises:
            OpdError: what ended the sampling of the step.
        """
        # Sampled k steps ago, by the plan of then: a strategy that asks for other rows now must not get those.
        asked = {row.key: row for row in planned}
        if any(asked.get(row.key) != row for row in self._share(self.plan(step))):
            raise RuntimeError(f"the rows that were sampled ahead for step {step} are not the ones asked for.")
        future = self._under_way[step].found
        while not wait([future], timeout=_POLL_SECONDS).done:
            poll()
        return future.result()

    def done(self, steps: int) -> None:
        """Forget what the first `steps` steps, which have been learnt, would be sampled again with."""
        self._under_way = {step: one for step, one in self._under_way.items() if step >= steps}
        needed = {one.version for one in self._under_way.values()}
        self._weights = {version: tensors for version, tensors in self._weights.items() if version in needed}
        for version in self._packed.keys() - needed:
            self._packed.pop(version).drop()

    def close(self) -> None:
        """Give up what is being sampled, at the end of its next row, and wait for the thread."""
        self._closing = True
        self._pool.shutdown(cancel_futures=True)

    def state_dict(self, steps: int) -> dict[str, Any]:
        """Plans and weights of the steps under way; weights after `steps` steps are those of the checkpoint itself."""
        under_way = [{"version": o.version, "plan": plan_to_state(o.plan)} for o in self._under_way.values()]
        old = {str(version): tensors for version, tensors in self._weights.items() if version != steps}
        return {"under_way": under_way, "weights": old}

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Sample what was under way again; the learner's weights are those after `steps` steps.

        Raises:
            CheckpointError: when it is of another student.
        """
        names = {name for name, _ in self._learner.named_parameters()}
        for one in state["under_way"]:
            version = int(one["version"])
            tensors = state["weights"].get(str(version)) if version != steps else self._snapshot(steps)
            if tensors is None or set(tensors) != names:
                raise CheckpointError(f"the weights after {version} steps in the checkpoint are of another student.")
            here = dict(self._learner.named_parameters())
            keep = placed if self._pack is not None else _whole  # they may have been saved by ranks without shards
            self._weights[version] = {name: keep(tensor, here[name]) for name, tensor in tensors.items()}
            self._start(plan_from_state(one["plan"]), version, self._weights[version])

    def _start(self, plan: StepPlan, version: int, weights: dict[str, Tensor]) -> None:
        if self._pack is not None and version not in self._packed:
            self._packed[version] = self._pack(weights, version)
        found = self._pool.submit(self._sample, self._share(plan), version, weights)
        self._under_way[plan.step] = _UnderWay(plan, version, found)

    def _share(self, plan: StepPlan) -> tuple[PlannedRow, ...]:
        ranks = self._learner.ranks
        return plan.shard(ranks.index, ranks.count).rows

    def _snapshot(self, version: int) -> dict[str, Tensor]:
        """A copy of the trained tensors on the host, or of this rank's shards, for all steps launched with it."""
        if version not in self._weights and self._pack is not None:
            self._weights[version] = {name: p.detach().clone() for name, p in self._learner.named_parameters()}
        if version not in self._weights:
            parameters = self._learner.whole_parameters()
            self._weights[version] = {name: p.detach().to("cpu", copy=True) for name, p in parameters}
        return self._weights[version]

    def _sample(self, planned: tuple[PlannedRow, ...], version: int, weights: dict[str, Tensor]) -> Sampled:
        """In the thread."""
        torch.set_num_threads(self._threads)  # a thread starts with a setting of its own
        begin = time.monotonic()
        idle = 0.0 if self._free is None else begin - self._free
        sent: list[float] = []

        def poll() -> None:
            if self._closing:
                raise CancelledError("the run has ended")

        def finished(row: Row) -> None:
            poll()
            sent.append(time.monotonic())
            self._on_row(row)

        if self._gate is not None:
            self._gate.wait(lambda: self._closing)
        # On a CPU there is no stream, and None changes nothing.
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
    """A copy for another thread: trained tensors, to be replaced, are its own, all others share memory.

    What a rollout does to flags of the copy's parameters, so that autocast keeps their casts, is not done to those of
    `model`, which may be trained meanwhile.
    """
    shared: dict[int, Any] = {id(p): copy.copy(p) for p in model.parameters() if not p.requires_grad}
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, shared)
