"""Rollout engines: they turn planned rows into sampled rows, with the student's current weights.

    open(setup)  ->  sync(parameters, version)  ->  sample(planned)  ->  ...  ->  close()

An engine samples from the trained model itself (`transformers`), or from a copy of the weights in an inference engine
inside or outside the process; `sync` updates that copy. The loop, evaluations, probes and services sample through one
`PolicySampler` (`student.rollout.policy_sampler`), which syncs whenever the weights may have moved, so that no engine
samples with old weights. A third party adds an engine through the entry-point group `opd.rollout_engines`.

The conformance suite requires of every engine that a row's tokens depend only on the weights, the prompt and the row's
own random stream (`student.data.streams`), that log-probs are those of the distribution sampled from, at the row's
temperature, and that every row carries the version of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import Field, model_validator
from typing_extensions import TypeVar

from opd.config import Settings
from opd.errors import PluginError
from opd.registry import Registry
from student.plugin.base import Plugin
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from student.data.plan import PlannedRow
    from student.data.row import Row
    from student.model.model import Student
    from student.model.ranks import Ranks
    from student.rollout.requests import RolloutSpec
    from student.run.space import Space

ROLLOUT_ENGINES = Registry(
    "rollout_engine",
    "opd.rollout_engines",
    member="settings_type",
    names={
        "transformers": "student.rollout.engine:TransformersRollout",
        "vllm": "student.rollout.vllm.engine:VllmRollout",
        "vllm_server": "student.rollout.servers.engine:VllmServerEngine",
        "sglang_server": "student.rollout.servers.engine:SglangServerEngine",
    },
)


OnRow = Callable[["Row"], None]


def ignore(row: Row) -> None:
    """Do nothing with a finished row."""


class RolloutEngineSettings(Settings):
    """Settings that every rollout engine has."""

    name: str
    """Registered name, or a dotted path "package.module:Class"."""
    mismatch_rows: int = Field(
        0, ge=0, description="Rows per rank and step that the student scores too, to measure the mismatch; 0: none."
    )
    mismatch_limit: float | None = Field(
        None,
        gt=0,
        description="Mismatch of a step, mean |log p - log q| per token in nats, above which the run stops.",
    )

    @model_validator(mode="after")
    def _check_limit(self) -> RolloutEngineSettings:
        if not self.mismatch_rows and "mismatch_limit" in self.model_fields_set and self.mismatch_limit is not None:
            raise ValueError("mismatch_limit is set, but mismatch_rows is 0, so nothing is measured; raise the latter")
        return self


@dataclass(frozen=True, slots=True)
class Shards:
    """A student that is sharded over ranks.

    Attributes:
        student: the sharded student; all ranks run its forward passes together.
        ranks: all ranks.
        run: path of the run folder, the same on all ranks.
    """

    student: Student
    ranks: Ranks
    run: str


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is opened with.

    Attributes:
        model: the trained student; its weights change in place.
        tokenizer: the student's tokenizer.
        spec: settings that every rollout of the run shares.
        path: folder or hub id that the weights were loaded from.
        revision: revision of a hub id, or None.
        shards: the sharded student; None if the student is not sharded.
        space: waits if a disk that the engine writes to is full; None to end the run.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: RolloutSpec
    path: str
    revision: str | None = None
    shards: Shards | None = None
    space: Space | None = None

    def dtype(self, asked: str) -> str:
        """Name of the dtype in which an engine with its own weights computes: `asked`, or for "auto" the rollouts'."""
        return asked if asked != "auto" else str(self.spec.autocast or self.model.dtype).removeprefix("torch.")


class PackedWeights(Protocol):
    """Weights that an engine has taken and can load later, in any thread and without the other ranks."""

    def load(self) -> None:
        """Make the engine sample from these weights from now on."""

    def drop(self) -> None:
        """Release the weights, which will not be loaded again."""


RolloutEngineSettings_co = TypeVar(
    "RolloutEngineSettings_co", bound=RolloutEngineSettings, covariant=True, default=RolloutEngineSettings
)


class RolloutEngine(Plugin[RolloutEngineSettings_co]):
    """Base class of rollout engines. Subclasses implement `sample` and, if they hold weights of their own, `sync`."""

    traits = Traits()
    """On the class, because sizing reads them without an engine."""

    def __init__(self, settings: RolloutEngineSettings_co) -> None:
        super().__init__(settings)
        self.version = 0
        self._counts: dict[str, float] = {}
        self._counting = threading.Lock()  # the loop takes the counts while another thread may be sampling

    def open(self, setup: EngineSetup) -> None:
        """Prepare for sampling; called once, after everything else of the run has been checked."""
        self.setup = setup

    def sync(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sample from `parameters` from now on.

        Args:
            parameters: the trained tensors, on the student's device, with their names in the saved model. They do not
                change until the next sync.
            version: number of steps that the weights have been trained for; sampled tokens carry it.
        """
        self.version = version

    def pack(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> PackedWeights:
        """Take the weights of a sharded student now, to load them later; every rank calls it at the same time.

        Args:
            parameters: as for `sync`.
            version: as for `sync`.
        """
        raise PluginError(f"{type(self).__name__} does not implement pack.")

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
        """Sample one row for each planned row; a planned row with an answer becomes a row with that answer.

        Args:
            planned: what to sample.
            purpose: first part of the key of the random streams; evaluations and probes use other keys than training.
            on_row: called in this thread with each row as soon as it is finished, in the order of finishing. If it
                raises, sampling ends with its error.

        Returns:
            The rows in the order of `planned`.

        Raises:
            DataError: for a prompt over the limit, or an answer that encodes to no token.
        """
        raise PluginError(f"{type(self).__name__} does not implement sample.")

    def rest(self) -> None:
        """Release memory that others can use between rollouts; called after every rollout, even an empty one."""

    def take(self) -> dict[str, float]:
        """Return and reset the counts, named "engine/NAME", for the metrics of a step."""
        with self._counting:
            counts, self._counts = self._counts, {}
        return counts

    def _count(self, name: str, amount: float) -> None:
        with self._counting:
            self._counts[f"engine/{name}"] = self._counts.get(f"engine/{name}", 0.0) + amount

    def close(self) -> None:
        """Release everything that the engine holds."""


class TransformersRollout(RolloutEngine[RolloutEngineSettings_co]):
    """The trained model itself, with a KV cache.

    Samples from the trained model itself, in process; see `student.rollout.transformers`.
    """

    traits = Traits(records_moe_routes=True)

    def sample(
        self, planned: Sequence[PlannedRow], *, purpose: tuple[object, ...] = ("rollout",), on_row: OnRow = ignore
    ) -> list[Row]:
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


class CopyEngine(TransformersRollout):
    """Samples from a copy of the student, whose trained tensors `sync` replaces."""

    traits = Traits(records_moe_routes=True, holds_weights=True)

    def sync(self, parameters: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See `RolloutEngine.sync`; tensors on the copy's device are used without copying and must not change."""
        given = dict(parameters)
        for name, parameter in self.setup.model.named_parameters():
            if name in given:
                parameter.data = given[name].to(parameter.device)
        super().sync(given.items(), version)
