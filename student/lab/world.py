"""The models of the lab and the servers that offer them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from student.lab.tiny.build import build_world
from student.lab.tiny.plans import Progress
from student.lab.tiny.summary import ModelSummary, WorldSummary
from student.run import local_server

PRESETS = {"full": "lab", "quick": "test"}
_QUICK_NAMES = {"base": "student"}
"""Models of the short form; every other name means its one teacher."""


@dataclass(frozen=True, slots=True)
class Cast:
    """The world with the names that experiments use: in the short form few models play all parts."""

    world: WorldSummary
    form: str

    def model(self, name: str) -> ModelSummary:
        """The model that plays `name`."""
        actual = name if self.form == "full" else _QUICK_NAMES.get(name, "teacher")
        return self.world.models[actual]


def open_world(root: Path, form: str, progress: Progress | None = None) -> Cast:
    """The world of a form ("full" or "quick"), built when it is missing."""
    return Cast(build_world(root / f"world-{PRESETS[form]}", PRESETS[form], seed=0, progress=progress), form)


@contextmanager
def served(cast: Cast, models: Sequence[str], folder: Path, *, replicas: int = 1) -> Iterator[tuple[str, ...]]:
    """Teacher servers with `models` of the cast, each in a process of its own; gives their addresses."""
    paths = {name: cast.model(name).path for name in models}
    with ExitStack() as stack:
        yield tuple(stack.enter_context(local_server.served(paths, folder / f"server-{i}")) for i in range(replicas))
