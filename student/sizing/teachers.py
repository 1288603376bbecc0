"""Estimates which models score a step's rows, how long they take, and whether the teachers' devices hold them.

Assumptions:

    rows            each goes to all teachers of its destination, and to the reference; several destinations (`routes`,
                    the default) get equal shares, because it is not known here which prompt goes where
    arithmetic      2 operations per weight of the layers and token read, and 2 per weight of the head and response
                    token, unless hidden states are sent
    memory          the weights are read once for each batch of 16,384 tokens
    devices         they share the work evenly, as replicas or as parts of one model
    in process      the student's own weights, the initial ones and their average run on the student's device

On a GPU the time is the longest of arithmetic, memory traffic and the host's launching of layers; on a CPU it is their
sum.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opd.errors import ConfigError
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import LOCAL_MODELS, REFERENCE, TEACHER, Needs
from student.settings.model import ModelSettings
from student.settings.recipe import Recipe
from student.settings.teachers import TeacherSettings
from student.sizing.hardware import GIB, USABLE, Hardware
from student.sizing.shape import ModelShape

_BATCH_TOKENS = 16_384
"""Tokens of an engine batch, by a server's default."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A payload that is asked of a model.

    Attributes:
        model: name of the model; "" if the recipe names none, because the fleet serves a single one.
        spec: the payload.
        share: share of the step's rows for which it is asked.
    """

    model: str
    spec: PayloadSpec
    share: float

    @property
    def served(self) -> bool:
        """Whether a teacher server answers, rather than a model in the student's process."""
        return self.model not in LOCAL_MODELS


def asks_of(recipe: Recipe, needs: Needs) -> list[Ask]:
    """List every payload that is asked of every model in a step."""
    settings = recipe.teachers or TeacherSettings()
    asks = []
    for need in needs.signals:
        names: dict[str, float] = {need.role: 1.0}
        if need.role == TEACHER:
            targets = [target for target in (settings.default, *settings.routes.values()) if target is not None]
            names = {} if targets else {"": 1.0}
            for target in targets:
                for name in [target] if isinstance(target, str) else target:
                    names[name] = names.get(name, 0.0) + 1 / len(targets)
        elif need.role == REFERENCE:
            names = {settings.reference or "": 1.0}
        asks += [Ask(name, need.spec, share) for name, share in names.items()]
    return asks


@dataclass(frozen=True, slots=True)
class Fleet:
    """The teachers' servers, as far as they are known.

    Attributes:
        models: shape of each model by name; the one under "" is that of every name that is not in the mapping.
        device: the device type of the servers.
        devices: number of devices of all servers together.
    """

    models: Mapping[str, ModelShape]
    device: Hardware
    devices: int = 1

    def shape(self, name: str) -> ModelShape | None:
        """The shape of the model called `name`; None if it is not known."""
        return self.models.get(name) or self.models.get("")

    def weights(self, asks: Sequence[Ask]) -> float:
        """Bytes of the weights of all served models that are asked, each counted once; unknown ones count 0."""
        names = {ask.model for ask in asks if ask.served}
        return sum(shape.weight_bytes for name in names if (shape := self.shape(name)) is not None)

    def unknown(self, asks: Sequence[Ask]) -> list[str]:
        """Names of the served models that are asked but whose shape is not known."""
        return sorted({ask.model for ask in asks if ask.served and self.shape(ask.model) is None})

    def check_names(self, asks: Sequence[Ask]) -> None:
        """Check that the recipe asks every model that was named.

        Raises:
            ConfigError: if not; the message lists the names that are asked.
        """
        asked = sorted({ask.model for ask in asks if ask.served})
        idle = sorted(self.models.keys() - {*asked, ""})
        if idle:
            names = ", ".join(map(repr, filter(None, asked))) or "none by name: give the model without one"
            raise ConfigError(f"--teacher names {idle[0]!r}, which the recipe does not use; it uses {names}.")

    def check_fits(self, asks: Sequence[Ask]) -> None:
        """Check that the devices can hold the weights.

        Raises:
            ConfigError: if not; the message says how many devices can.
        """
        room, weights = self.device.memory * USABLE - self.device.reserve, self.weights(asks)
        if weights > self.devices * room:
            raise ConfigError(
                f"the teachers' weights take {weights / GIB:.1f} GiB, but {self.devices} x {self.device.name} has room "
                f"for {self.devices * room / GIB:.1f}; plan with --teacher-gpus {math.ceil(weights / room)} or more."
            )


def fleet_of(models: Sequence[str], device: Hardware, devices: int) -> Fleet:
    """Make a fleet from the values of `--teacher`, each MODEL or NAME=MODEL.

    Weights are taken to be bfloat16 on a GPU and float32 on a CPU, as servers load them.

    Raises:
        ConfigError: when the config of a model cannot be read, or two models have the same name.
    """
    shapes: dict[str, ModelShape] = {}
    for entry in models:
        name, given, path = entry.partition("=")
        # A folder may have "=" in its path, and no teacher has "/" in its name.
        name, path = (name, path) if given and "/" not in name else ("", entry)
        if name in shapes:
            clash = f"two models are given for teacher {name!r}" if name else "two models are given without a name"
            raise ConfigError(f"{clash}; name each as in the recipe, with --teacher NAME=MODEL.")
        shapes[name] = ModelShape(ModelSettings(path=path, dtype="bfloat16" if device.gpu else "float32"))
    return Fleet(shapes, device, devices)


def seconds_of(
    asks: Sequence[Ask], shape: ModelShape, read: float, scored: float, device: Hardware
) -> tuple[float, str]:
    """Seconds in which one device answers what is asked of one model in a step, and the resource that bounds them.

    Args:
        asks: all payloads asked of the model; those for the same rows come from one forward pass.
        shape: sizes of the model.
        read: number of tokens of all rows of the step, prompts included.
        scored: number of response tokens among them.
        device: the device on which the model runs.
    """
    share = max(ask.share for ask in asks)
    headed = any(ask.spec.kind is not PayloadKind.HIDDEN for ask in asks)
    head = shape.vocabulary * shape.hidden * scored if headed else 0.0
    batches = max(1, math.ceil(share * read / _BATCH_TOKENS))
    parts = {
        "arithmetic": 2 * share * ((shape.active - shape.outside) * read + head) / (device.flops * device.reached),
        "memory": batches * shape.weight_bytes / device.bandwidth,
        "launching layers": batches * shape.layers * device.overhead,
    }
    bound = max(parts, key=lambda name: parts[name])
    return parts[bound] if device.overlaps else sum(parts.values()), bound


def stages_of(
    asks: Sequence[Ask], fleet: Fleet, student: ModelShape, read: float, scored: float, own: Hardware, ranks: int
) -> Iterator[tuple[str, float, str]]:
    """Give (stage, seconds of a step, what bounds it) for stages "teachers" and "in process", where there are any.

    "teachers" covers the served models whose shapes are known. What bounds a stage is what bounds its slowest model.

    Args:
        asks: see `asks_of`.
        fleet: the servers and the shapes of their models.
        student: the shape of the models in the student's process.
        read: number of tokens of all rows of the step on all ranks, prompts included.
        scored: number of response tokens among them.
        own: the device of a rank.
        ranks: number of the student's ranks, which share the rows.
    """
    by_model: dict[str, list[Ask]] = {}
    for ask in asks:
        by_model.setdefault(ask.model, []).append(ask)
    for stage, served in (("teachers", True), ("in process", False)):
        models: list[tuple[float, str]] = []
        for name, of in by_model.items():
            shape = fleet.shape(name) if served else student
            if of[0].served is served and shape is not None:
                device, parts = (fleet.device, fleet.devices) if served else (own, ranks)
                seconds, bound = seconds_of(of, shape, read, scored, device)
                models.append((seconds / parts, bound))
        if models:
            yield stage, sum(seconds for seconds, _ in models), max(models)[1]
