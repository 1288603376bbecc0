"""Rollout engines: what turns planned rows into sampled ones, with the student's present weights.

    opened  ->  sync(parameters, version)  ->  sample(planned)  ->  ...  ->  closed

An engine may sample from the trained model itself (`transformers`) or from a copy of the weights that it holds (an
inference server in or beside the process); `sync` is where it takes the copy. The loop, evaluations, probes and
services sample through one `Sampler`, which syncs whenever the weights may have moved, so that no engine is asked with
old ones. A third party adds an engine through the entry-point group `opd.rollout_engines`.

An engine owes what the conformance suite asks of all: a row's tokens depend on weights, prompt and the row's own random
stream (`student.data.streams`) alone, log-probs are those of the distribution sampled from, at the row's temperature,
and every row carries the version of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from opd.config import Settings
from opd.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from student.data.plan import PlannedRow
    from student.data.row import Row
    from student.learning.learner import Learner
    from student.recipe import Recipe
    from student.rollout.episodes import EpisodePlayer
    from student.rollout.spec import RolloutSpec

ROLLOUT_ENGINES = Registry("rollout_engine", "opd.rollout_engines", member="settings_type")
ROLLOUT_ENGINES.add(
    "transformers", "student.rollout.engine:TransformersEngine", "the trained model itself, with a KV cache"
)

OnRow = Callable[["Row"], None]


def ignore(row: Row) -> None:
    """Takes a finished row and does nothing with it."""


class EngineSettings(Settings):
    """Settings that every rollout engine has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is opened with.

    Attributes:
        model: the student as it is trained; its weights change in place.
        tokenizer: the student's.
        spec: what every rollout of the run shares.
        path: folder or hub id that the weights were loaded from.
        revision: of a hub id, or None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: RolloutSpec
    path: str
    revision: str | None = None


class RolloutEngine:
    """Base of rollout engines; subclasses implement `sample` and, where they hold weights of their own, `sync`."""

    settings_type: ClassVar[type[EngineSettings]] = EngineSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.version = 0

    def check(self, recipe: Recipe) -> None:
        """Look at the whole recipe before anything is loaded, also in a dry run.

        Raises:
            ConfigError: when the engine cannot sample for it.
        """

    def open(self, setup: EngineSetup) -> None:
        """Get ready to sample; called once, when everything else of the run has been checked."""
        self.setup = setup

    def sync(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample from `parameters` from now on.

        Args:
            parameters: names, as the saved model has them, and trained tensors on the student's device; only valid
                during the call.
            version: steps of the run that the weights have seen; sampled tokens carry it.
        """
        self.version = version

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        """One row for each planned one, sampled unless it brings its answer.

        Args:
            planned: what to sample.
            purpose: first names of the random streams; evaluations and probes use others than training.
            on_row: called with each row as soon as it is finished, in this thread and in order of finishing; when it
                raises, sampling ends with its error.

        Returns:
            The rows in the order of `planned`.

        Raises:
            DataError: for a prompt over the limit, or an answer that encodes to no token.
        """
        raise TypeError(f"{type(self).__name__} does not implement sample")

    def fork(self, model: PreTrainedModel) -> RolloutEngine:
        """An engine that samples from `model`, a copy of the student, and may be used in another thread."""
        engine = TransformersEngine(EngineSettings(name="transformers"))
        engine.open(EngineSetup(model, self.setup.tokenizer, self.setup.spec, self.setup.path, self.setup.revision))
        engine.version = self.version
        return engine

    def close(self) -> None:
        """Release what the engine holds."""


class TransformersEngine(RolloutEngine):
    """Samples from the trained model itself, in process; see `student.rollout.transformers`."""

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        """See `RolloutEngine.sample`."""
        from student.rollout.transformers import rollout

        return rollout(
            self.setup.model,
            self.setup.tokenizer,
            planned,
            self.setup.spec,
            policy_version=self.version,
            purpose=purpose,
            on_row=on_row,
        )


class Sampler:
    """The run's rollout engine, given the present weights before it samples.

    Args:
        engine: the opened engine.
        learner: whose weights it samples from.
        player: plays the rows that are episodes.

    Attributes:
        version: steps that the weights have seen; the loop sets it through `moved`.
    """

    def __init__(self, engine: RolloutEngine, learner: Learner, player: EpisodePlayer) -> None:
        self._engine, self._learner, self._player = engine, learner, player
        self.version = 0
        self._synced: tuple[int, int] | None = None
        self._exposed = False

    def moved(self, version: int) -> None:
        """Say that the weights have changed, and are those after `version` steps."""
        self.version, self._synced, self._exposed = version, None, False

    def expose(self) -> None:
        """Have every rollout until the next `moved` sync: somebody holds the tensors and may write to them."""
        self._exposed = True

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        """See `RolloutEngine.sample`; with the weights as they are now."""
        present = (self.version, self._learner.updates)
        if self._exposed or self._synced != present:
            self._engine.sync(self._learner.named_parameters(), self.version)
            self._synced = present
        played = [row for row in planned if self._player.plays(row)]
        if not played:
            return self._engine.sample(planned, purpose=purpose, on_row=on_row)

        def turn(rows: Sequence[PlannedRow], names: tuple[object, ...]) -> list[Row]:
            return self._engine.sample(rows, purpose=names)

        others = [row for row in planned if not self._player.plays(row)]
        found = iter(self._engine.sample(others, purpose=purpose, on_row=on_row) if others else [])
        episodes = iter(self._player.play(played, turn, purpose=purpose, on_row=on_row))
        return [next(episodes if self._player.plays(row) else found) for row in planned]

    def fork(self, model: PreTrainedModel) -> RolloutEngine:
        """See `RolloutEngine.fork`."""
        engine = self._engine.fork(model)
        engine.version = self.version
        return engine
