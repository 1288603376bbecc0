"""The models of the lab and the servers that offer them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from opd.errors import DataError
from student.lab.experiment import Experiment
from student.lab.tiny.build import build_world
from student.lab.tiny.summary import ModelSummary, WorldSummary, read_summary
from student.run import local_server

_QUICK_NAMES = {"base": "student", "merge": "student"}
"""Models of the short form; every other name means its one teacher."""


@dataclass(frozen=True, slots=True)
class WorldModels:
    """A world with the names that experiments use: in the short form few models stand for all of them."""

    world: WorldSummary
    form: str

    def model(self, name: str) -> ModelSummary:
        """The model that `name` means."""
        actual = name if self.form == "full" else _QUICK_NAMES.get(name, "teacher")
        return self.world.models[actual]


@dataclass(frozen=True, slots=True)
class WorldBuild:
    """A world to be built, by whatever process."""

    folder: Path
    preset: Path | str
    seed: int

    @classmethod
    def of(cls, root: Path, experiment: Experiment, seed: int, form: str) -> "WorldBuild":
        """What is to be built for an experiment."""
        preset = experiment.world_file if form == "full" else "test"
        return cls(world_folder(root, experiment, seed, form), preset, seed)

    @property
    def done(self) -> bool:
        """Whether the folder holds a whole world, of whatever version."""
        found = read_summary(self.folder) if self.folder.is_dir() else None
        return found is not None and found.complete

    def build(self) -> WorldSummary:
        """The world, built where it is missing; errors as of `build_world`."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return build_world(self.folder, self.preset, seed=self.seed)


def world_folder(root: Path, experiment: Experiment, seed: int, form: str) -> Path:
    """Where a world of an experiment is; experiments that name one file share it."""
    name = experiment.world_file.stem if form == "full" else "test"
    return root / "worlds" / f"{name}-{seed}"


def open_world(root: Path, experiment: Experiment, seed: int, form: str) -> WorldModels:
    """The world of an experiment with a seed, built when it is missing.

    Raises:
        DataError: when the folder holds a world of another version; the sentence names it.
    """
    return WorldModels(WorldBuild.of(root, experiment, seed, form).build(), form)


def find_world(root: Path, experiment: Experiment, seed: int, form: str) -> WorldModels:
    """The world of an experiment as it is, of whatever version; nothing is built.

    Raises:
        DataError: when there is none, or it is not complete.
    """
    folder = world_folder(root, experiment, seed, form)
    found = read_summary(folder) if folder.is_dir() else None
    if found is None or not found.complete:
        raise DataError(f"{folder} holds no finished world; run `opd lab run {experiment.name}`, which builds it.")
    return WorldModels(found, form)


@contextmanager
def served(models: WorldModels, names: Sequence[str], folder: Path, *, replicas: int = 1) -> Iterator[tuple[str, ...]]:
    """Teacher servers with the named models, each in a process of its own; gives their addresses."""
    paths = {name: models.model(name).path for name in names}
    with ExitStack() as stack:
        yield tuple(stack.enter_context(local_server.served(paths, folder / f"server-{i}")) for i in range(replicas))
