"""Builds a world of tiny models in a folder, or returns the one that is there."""

import time
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from opd.errors import ConfigError, DataError
from opd.files import check_writable
from opd_lab.tiny.files import is_world_file
from opd_lab.tiny.plans import Progress, WorldPlan, model_seed
from opd_lab.tiny.presets import world_key, world_plan
from opd_lab.tiny.summary import FILE, WorldSummary, read_summary, write_summary


def build_world(
    folder: str | Path, preset: str | Path = "demo", *, seed: int = 0, progress: Progress | None = None
) -> WorldSummary:
    """Build the world of `preset` in `folder` on one CPU thread. The same preset and seed give the same weights.

    A finished world of the same preset and seed is returned as it is. An interrupted build continues with the first
    missing model. If several processes call this for the same folder, one builds and the others wait.

    Args:
        folder: folder of the world, created if it does not exist. Each model gets a folder in it, and world.json
            describes them.
        preset: "test" (seconds), "demo" (a minute or two), "lab" (many minutes), or the path of a world file.
        seed: seed of weights and problems, in [0, 2**32); errors in answers follow from the problems.
        progress: called after each training step.

    Raises:
        ConfigError: for an unknown preset, a file that does not describe a world, or a seed out of range.
        DataError: when the folder holds another world or other files.
        OutputError: when the folder or a model cannot be written.
    """
    plan = world_plan(str(preset))
    preset = Path(preset).stem if is_world_file(preset) else str(preset)
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed of a tiny world is {seed}; use one from 0 to {2**32 - 1}.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; choose a folder for the world.")
    world = _open(folder, preset, seed, plan)
    if not world.complete:
        check_writable(folder, f"folder {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            world = _open(folder, preset, seed, plan)  # another process may have continued it in the meantime
            if not world.complete:
                return _build(world, plan, progress)
    return replace(world, cached=True)


def _build(world: WorldSummary, plan: WorldPlan, progress: Progress | None) -> WorldSummary:
    """Build the missing models and return the complete world."""
    # Imported only here, so that a world that exists already does not cost an import of torch.
    from opd_lab.tiny.builder import Builder, quiet_thread

    # Written before the first model, so that the folder of a build that is killed is recognized as a world.
    write_summary(world)
    begun = time.perf_counter() - world.seconds
    with quiet_thread():
        builder = Builder(world, plan, progress)
        for index, name in enumerate(plan.models):
            if name in world.models:
                continue
            model = builder.build(name, model_seed(world.seed, index))
            world = replace(world, models={**world.models, name: model}, seconds=time.perf_counter() - begun)
            builder.world = world
            write_summary(world)
    world = replace(world, complete=True)
    write_summary(world)
    return world


def _open(folder: Path, preset: str, seed: int, plan: WorldPlan) -> WorldSummary:
    """The world in the folder as far as it exists, or one without models.

    Raises:
        DataError: when the folder holds other files or another world.
    """
    key = world_key(plan, seed)
    found = read_summary(folder)
    if found is None:
        paths = folder.iterdir() if folder.exists() else ()
        others = sorted(path.name for path in paths if not path.name.startswith("."))
        if others:
            raise DataError(f"{folder} is not empty ({others[0]} ...) and holds no {FILE}; choose another folder.")
        tasks = {name: task.model_dump(mode="json", exclude_defaults=True) for name, task in plan.tasks.items()}
        return WorldSummary(folder, preset, seed, key, tasks, {}, plan.max_new_tokens)
    if found.key != key:
        same = found.preset == preset and found.seed == seed
        raise DataError(
            f"{folder} holds the world {found.preset!r} with seed {found.seed}"
            f"{', built by another version' if same else f', not {preset!r} with seed {seed}'}; "
            "choose another folder or remove this one."
        )
    return found
