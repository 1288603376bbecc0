"""The worlds of the lab's experiments: where they are, how they are built, and the servers of their models."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opd.errors import DataError
from opd_lab.experiment import Experiment
from opd_lab.tiny.build import build_world
from opd_lab.tiny.summary import ModelSummary, WorldSummary, read_summary
from student.run import local_server

_QUICK_NAMES = {"base": "student", "merge": "student"}
"""Names that mean the student in the short form; all other names mean its only teacher."""


@dataclass(frozen=True, slots=True)
class WorldModels:
    """A world in which models are found by the names that experiments use.

    The world of the short form has few models, which stand for all names.
    """

    world: WorldSummary
    form: str

    def model(self, name: str) -> ModelSummary:
        """The model that an experiment calls `name`."""
        actual = name if self.form == "full" else _QUICK_NAMES.get(name, "teacher")
        return self.world.models[actual]


@dataclass(frozen=True, slots=True)
class WorldBuild:
    """A world to be built; it can be sent to another process."""

    folder: Path
    preset: Path | str
    seed: int

    @classmethod
    def of(cls, root: Path, experiment: Experiment, seed: int, form: str) -> "WorldBuild":
        """The build of an experiment's world."""
        preset = experiment.world_file if form == "full" else "test"
        return cls(world_folder(root, experiment, seed, form), preset, seed)

    @property
    def done(self) -> bool:
        """Whether the folder holds a complete world."""
        found = read_summary(self.folder) if self.folder.is_dir() else None
        return found is not None and found.complete

    def build(self) -> WorldSummary:
        """Build the world if it is missing and return it; raises what `build_world` raises."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return build_world(self.folder, self.preset, seed=self.seed)


def world_folder(root: Path, experiment: Experiment, seed: int, form: str) -> Path:
    """The folder of an experiment's world. Experiments with the same world file share it."""
    name = experiment.world_file.stem if form == "full" else "test"
    return root / "worlds" / f"{name}-{seed}"


def open_world(root: Path, experiment: Experiment, seed: int, form: str) -> WorldModels:
    """Return the world of an experiment with a seed; it is built if it is missing.

    Raises:
        DataError: when the folder holds another world, or this one as built by another version of opd.
    """
    return WorldModels(WorldBuild.of(root, experiment, seed, form).build(), form)


def find_world(root: Path, experiment: Experiment, seed: int, form: str) -> WorldModels:
    """Return the world of an experiment as it is; nothing is built.

    Raises:
        DataError: when it is missing or not complete.
    """
    folder = world_folder(root, experiment, seed, form)
    found = read_summary(folder) if folder.is_dir() else None
    if found is None or not found.complete:
        raise DataError(f"{folder} holds no finished world; build it with `opd lab run {experiment.name}`.")
    return WorldModels(found, form)


@contextmanager
def served(models: WorldModels, names: Sequence[str], folder: Path, *, replicas: int = 1) -> Iterator[tuple[str, ...]]:
    """Run `replicas` teacher servers while the context is open, each with all named models; gives their addresses."""
    paths = {name: models.model(name).path for name in names}
    with ExitStack() as stack:
        yield tuple(stack.enter_context(local_server.served(paths, folder / f"server-{i}")) for i in range(replicas))
