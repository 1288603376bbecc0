"""The sampler through which all rollouts of a run go: its engine is synced to the current weights before it samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from opd.errors import PluginError, short
from opd.tasks.encode import encode_prompt
from student.rollout.engine import (
    EngineSetup,
    OnRow,
    PackedWeights,
    RolloutEngine,
    RolloutEngineSettings,
    TransformersRollout,
    ignore,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow
    from student.data.row import Row
    from student.learning.learner import Learner
    from student.rollout.episodes import EpisodePlayer


def sample_or_play(
    engine: RolloutEngine,
    player: EpisodePlayer,
    planned: Sequence[PlannedRow],
    *,
    purpose: tuple[object, ...] = ("rollout",),
    on_row: OnRow = ignore,
    poll: Callable[[], None] = lambda: None,
) -> list[Row]:
    """`RolloutEngine.sample`, except that `player` plays episodes turn by turn; `poll` may raise between turns."""
    played = [row for row in planned if player.plays(row)]
    if not played:
        return engine.sample(planned, purpose=purpose, on_row=on_row)

    def turn(rows: Sequence[PlannedRow], names: tuple[object, ...]) -> list[Row]:
        return engine.sample(rows, purpose=names, on_row=lambda row: poll())

    others = [row for row in planned if not player.plays(row)]
    sampled = iter(engine.sample(others, purpose=purpose, on_row=on_row) if others else [])
    episodes = iter(player.play(played, turn, purpose=purpose, on_row=on_row))
    return [next(episodes if player.plays(row) else sampled) for row in planned]


class PolicySampler:
    """The run's rollout engine, synced to the current weights before it samples.

    Args:
        engine: the opened engine.
        learner: holds the weights to sample from.
        player: plays the rows that are episodes.
        beside: whether a sampling-ahead thread borrows the engine through `lend`, on every rank. All ranks must then
            call `sample` equally often.

    Attributes:
        version: number of steps that the weights have been trained for; the loop sets it through `moved`.
    """

    def __init__(self, engine: RolloutEngine, learner: Learner, player: EpisodePlayer, *, beside: bool = False) -> None:
        self._engine, self._learner, self._player = engine, learner, player
        self._beside = beside
        self.version = 0
        self._synced: tuple[int, int] | None = None
        self._exposed = False
        self._lock = threading.RLock()

    def moved(self, version: int) -> None:
        """Record that the weights have changed and are those after `version` steps."""
        self.version, self._synced, self._exposed = version, None, False

    def expose(self) -> None:
        """Sync before every rollout until the next `moved`, because a controller holds tensors that it may write to."""
        self._exposed = True

    def sample(
        self,
        planned: Sequence[PlannedRow],
        *,
        purpose: tuple[object, ...] = ("rollout",),
        on_row: OnRow = ignore,
        poll: Callable[[], None] = lambda: None,
    ) -> list[Row]:
        """`sample_or_play` with the current weights; ranks of a sharded student call it together."""
        # Steps alone do not tell weights apart, because a step may make several updates.
        present = (self.version, self._learner.updates)
        with self._lock:
            if self._beside and self._engine.traits.shared:
                # A thread of another rank may still be sampling with other weights; it holds that rank's lock.
                self._learner.ranks.gather(None)
            if self._exposed or self._synced != present:
                # Engines that gather shards themselves enter `bound` where a rank may fail alone.
                gathers = self._learner.sharded and not self._engine.traits.takes_shards
                with self._learner.ranks.bound() if gathers else nullcontext():
                    self._engine.sync(self._parameters(), self.version)
                self._synced = present
            try:
                with self._learner.whole() if self._reads(planned) else nullcontext():
                    if not planned:  # other ranks may have rows, and all ranks must gather the weights together
                        return []
                    rows = sample_or_play(
                        self._engine, self._player, planned, purpose=purpose, on_row=on_row, poll=poll
                    )
                if not isinstance(rows, list) or len(rows) != len(planned):
                    gave = f"{len(rows)} rows" if isinstance(rows, list) else short(rows)
                    raise PluginError(
                        f"{type(self._engine).__name__}.sample returned {gave} for {len(planned)} planned rows; it "
                        "must return a list with one row for each."
                    )
                return rows
            finally:
                self._engine.rest()

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt is within rollout.max_prompt_tokens."""
        return len(encode_prompt(prompt, self._player.tokenizer)) <= self._player.spec.max_prompt_tokens

    def said(self, row: Row) -> list[str]:
        """The student's turns in an episode as text, without special tokens."""
        decode = self._player.tokenizer.decode
        return [str(decode(row.response_ids[start:end], skip_special_tokens=True)) for start, end in row.actions]

    def pack(self, version: int) -> PackedWeights:
        """`RolloutEngine.pack` with the student's current weights."""
        return self._engine.pack(self._parameters(), version)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        learner = self._learner
        return learner.named_parameters() if self._engine.traits.takes_shards else learner.whole_parameters()

    def _reads(self, planned: Sequence[PlannedRow]) -> bool:
        """Whether any rank runs the student itself, to sample from it or to read answers that are given."""
        if not self._engine.traits.holds_weights:
            return True
        return self._learner.sharded and self._learner.ranks.any(any(row.answer is not None for row in planned))

    @contextmanager
    def lend(self) -> Iterator[RolloutEngine]:
        """Lend the engine to another thread, which syncs it itself; `sample` waits until it is returned."""
        with self._lock:
            self._synced = None  # the borrower leaves its own weights in the engine
            try:
                yield self._engine
            finally:
                self._engine.rest()

    def take(self) -> dict[str, float]:
        """Return and reset the engine's counts, for the metrics of a step."""
        return self._engine.take()

    def fork(self, model: PreTrainedModel) -> RolloutEngine:
        """An engine that samples from `model`, a copy of the student, and may be used in another thread."""
        setup, engine = self._engine.setup, TransformersRollout(RolloutEngineSettings(name="transformers"))
        engine.open(EngineSetup(model, setup.tokenizer, setup.spec, setup.path, setup.revision))
        engine.version = self.version
        return engine
