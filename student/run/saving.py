"""Saving and restoring a run: what the loop remembers between steps, and the checkpoint of all that has state."""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.errors import CheckpointError, OpdError, RunFolderError
from student.controllers import EvalReport
from student.data.outcome import Outcome
from student.job import Job
from student.learning.ranks import ALONE
from student.learning.sharding import mesh_of
from student.recipe import Recipe
from student.run.beside import Beside
from student.run.checkpoint import save_checkpoint
from student.run.evaluation import from_json, to_json
from student.run.folder import RunFolder
from student.run.model_folder import model_parts
from student.run.parts import Part
from student.run.random_state import begin_random, random_parts, random_state, restore_random
from student.run.space import Space
from student.run.state_io import check_state, load_state, state_parts

_STATES = {"objective": "objective", "rewards": "rewards", "methods": "controllers"}
"""Groups of the recipe, with the keys under which a checkpoint has the states of their plug-ins, by place."""


@dataclass
class Unfinished:
    """A step whose update is done, while what follows it is not: saved when the run stops there.

    Attributes:
        metrics: of the step so far.
        outcomes: of the rows of the step, on all ranks.
        seconds: of the stages of the step so far, by name; a clock that runs on goes on adding to them.
        acted: controllers that have acted on the weights.
        observed: whether the controllers have seen the report.
    """

    metrics: dict[str, float]
    outcomes: list[Outcome]
    seconds: dict[str, float] = field(default_factory=dict)
    acted: int = 0
    observed: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON values, for the checkpoint."""
        outcomes = [outcome.to_dict() for outcome in self.outcomes]
        return {**vars(self), "outcomes": outcomes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Unfinished":
        """What `to_json` gave."""
        return cls(**{**data, "outcomes": [Outcome.from_dict(outcome) for outcome in data["outcomes"]]})


@dataclass
class LoopState:
    """What the loop itself remembers between steps.

    Attributes:
        steps: steps done; the weights are those after the last of them.
        tokens: response tokens sampled for training, on all ranks.
        began: `time.monotonic()` when the run would have begun without interruptions.
        before: the evaluation before the first step.
        unfinished: what is left to do of the last step, or None.
        last: metrics and seconds by stage of the last finished step; its line is written after its checkpoint.
    """

    steps: int
    tokens: int
    began: float
    before: EvalReport | None = None
    unfinished: Unfinished | None = None
    last: tuple[dict[str, float], dict[str, float]] | None = None


class Saver:
    """Writes and reads the checkpoints of a run.

    Args:
        job: whose weights, optimizer, terms and controllers are saved.
        folder: the run folder.
        log: takes lines for people.
        saved: called when a checkpoint is written.
    """

    def __init__(
        self, job: Job, folder: RunFolder, log: Callable[[str], None], saved: Callable[[], None] = lambda: None
    ) -> None:
        self._job, self._folder, self._log, self._saved = job, folder, log, saved
        self._beside: Beside | None = None
        if job.recipe.train.async_checkpoints:
            self._beside, self._ranks = Beside(), job.learner.ranks.beside()
            # A fast tokenizer may not be used by two threads at once.
            self._tokenizer = copy.deepcopy(job.tokenizer)
        self._writing = -1  # steps of the checkpoint that is written beside the loop
        self._waited, self._failed = 0.0, 0
        # Steps of the newest checkpoint, as all ranks know it and as this one does: an outage has one rank save alone.
        self._agreed = self._written = -1

    @property
    def sharded(self) -> bool:
        """Whether no rank can save alone."""
        return self._job.learner.sharded

    def open(self, checkpoint: Path | None) -> LoopState:
        """The state in `checkpoint`, with learner, terms and controllers as they were; that of a new run for None.

        Raises:
            CheckpointError: when the checkpoint is of another recipe, version or seed.
        """
        main = self._job.accelerator.is_main_process
        found = self._job.learner.ranks.gather(checkpoint and checkpoint.name)
        if len(set(found)) > 1:
            raise CheckpointError(
                f"the ranks found different checkpoints ({', '.join(map(str, found))}); all must see one run folder."
            )
        begin_random(self._job.recipe.seed, self._job.learner.ranks.index)
        state = LoopState(steps=0, tokens=0, began=time.monotonic())
        if checkpoint is None:
            self._plugin_states()  # a state that cannot be saved would lose the steps before the first checkpoint
        else:
            state = self._restore(checkpoint)
            self._agreed = self._written = state.steps
        if main:
            # Without a checkpoint even what the first evaluation wrote is written again.
            done = -1 if checkpoint is None else state.steps
            self._folder.cut(done, unfinished=state.unfinished is not None)
            self._folder.keep_recipe(self._job.recipe, state.steps)
        return state

    def save(self, state: LoopState, *, together: bool = True, wait: bool = True) -> Path:
        """Save the state after the last step, once.

        Args:
            state: of the loop.
            together: all ranks do so at the same time.
            wait: until it is written, also with `train.async_checkpoints`.

        Raises:
            RunFolderError: when a rank cannot write; on all that save, and wait.
        """
        begin = time.monotonic()
        self.settle()
        root, ranks = self._folder.checkpoints, self._job.learner.ranks
        final = root / f"step-{state.steps:06d}"
        if self._agreed == state.steps:
            return final
        if not together and self.sharded:
            raise TypeError("the parts of a sharded student are saved by all ranks together")
        if not together and ranks.index:
            return final  # the first rank does it
        # In an outage the first rank may have saved this step by itself: the others must skip it together with it.
        written = ranks.gather(self._written)[0] if together else self._written
        if written != state.steps:
            if self._beside is not None and not wait:
                self._start(self._beside, state)
                self._waited = time.monotonic() - begin
                return final
            keep = self._job.recipe.train.keep_checkpoints
            group = ranks if together else ALONE
            # In an outage the other ranks wait for a teacher, and not for this one.
            space = self._folder.space if together else Space()
            space.until_written(
                lambda: save_checkpoint(root, state.steps, self._parts(state), keep=keep, ranks=group), group.any
            )
            self._saved()
        self._written = state.steps
        if together:
            self._agreed = state.steps
        return final

    def _start(self, beside: Beside, state: LoopState) -> None:
        """Copy what this rank holds, and write it while the loop goes on."""
        parts, root, steps = list(self._parts(state, copied=True)), self._folder.checkpoints, state.steps
        keep, then = self._job.recipe.train.keep_checkpoints, "let the run go on: it tries the next one"
        beside.start(lambda: save_checkpoint(root, steps, parts, keep=keep, ranks=self._ranks, then=then))
        self._writing = steps

    def settle(self, *, patient: bool = True) -> None:
        """See how the checkpoint that is written beside the loop became; wait for it, or leave it if it is not done.

        All ranks alike report a checkpoint that could not be written; the run goes on with the one before.
        """
        if self._beside is None or self._writing < 0 or (self._beside.busy and not patient):
            return
        steps, self._writing = self._writing, -1
        try:
            self._beside.wait()
        except RunFolderError as error:
            self._failed += 1
            self._log(f"warning: {error}")
            return
        self._written = self._agreed = steps
        self._saved()

    def metrics(self) -> dict[str, float]:
        """Of writing beside the loop: seconds that it waited in its last save, seconds of the last write, failures."""
        if self._beside is None:
            return {}
        waited, self._waited = self._waited, 0.0
        return {
            "checkpoint/waited_seconds": waited,
            "checkpoint/write_seconds": self._beside.seconds,
            "checkpoint/failed": float(self._failed),
        }

    def outdate(self) -> None:
        """Have the next save write: the state has changed since, although the number of steps is the same."""
        self._agreed = self._written = -1

    def _parts(self, state: LoopState, *, copied: bool = False) -> Iterator[Part]:
        """What this rank writes, gathered one part after the other; `copied` to be written beside the loop."""
        job = self._job
        ranks = job.learner.ranks
        tokenizer, group = (self._tokenizer, self._ranks.group) if copied else (job.tokenizer, None)
        yield from model_parts("model", job.learner.student, tokenizer, ranks, copied=copied)
        for name, values in self._states(state).items():
            yield from state_parts(f"trainer/{name}", values, main=ranks.index == 0, group=group, copied=copied)
        # Where a gradient is begun, which a resumed run takes again, that of before it.
        yield from random_parts("trainer", ranks.index, job.learner.random or random_state(job.accelerator.device))

    def _states(self, state: LoopState) -> dict[str, dict[str, Any]]:
        """Everything beside the model, by the file that it is written to."""
        job = self._job
        found = {"learner": job.learner.state_dict()}
        if kept := job.local.state_dict():
            found["local"] = kept
        if job.ahead is not None:
            found["ahead"] = job.ahead.state_dict(state.steps)
        # Plug-ins go by their places in the recipe, because two of them may have one name.
        found["loop"] = {
            "steps": state.steps,
            "tokens": state.tokens,
            # What has passed, and no point in time: the clock of another process begins elsewhere.
            "seconds": time.monotonic() - state.began,
            "seed": job.recipe.seed,
            "before": None if state.before is None else to_json(state.before),
            "unfinished": None if state.unfinished is None else state.unfinished.to_json(),
            "last": state.last,
            "prompts": job.cursor.position,
            "names": _names(job.recipe),
            **self._plugin_states(),
        }
        return found

    def _plugin_states(self) -> dict[str, dict[str, Any]]:
        """The states of all plug-ins.

        Raises:
            PluginError: for a state that cannot be saved.
        """
        job = self._job
        found = {
            "objective": job.learner.objective.state_dict(),
            "strategy": job.strategy.state_dict(),
            "rewards": job.rewards.state_dict(),
            "controllers": {str(i): c.state_dict() for i, c in enumerate(job.controllers)},
        }
        check_state("rollout.strategy", found["strategy"])
        for name, key in _STATES.items():
            for place, state in found[key].items():
                check_state(f"{name}.{place}", state)
        return found

    def _restore(self, checkpoint: Path) -> LoopState:
        job, trainer, mesh = self._job, checkpoint / "trainer", mesh_of(self._job.learner.student)
        state: dict[str, Any] = load_state(trainer, "loop", mesh)
        try:
            if state["seed"] != job.recipe.seed:
                raise CheckpointError(
                    f"checkpoint {checkpoint} is from a run with seed {state['seed']}, but the recipe has seed "
                    f"{job.recipe.seed}; use the same recipe to resume."
                )
            _check_places(state, job.recipe, checkpoint)
            job.learner.load_state_dict(load_state(trainer, "learner", mesh))
            if (trainer / "local.json").exists():
                job.local.load_state_dict(load_state(trainer, "local", mesh))
            if job.ahead is not None:
                job.ahead.load_state_dict(load_state(trainer, "ahead", mesh), int(state["steps"]))
            with _given_to("objective", checkpoint):
                job.learner.objective.load_state_dict(state["objective"])
            with _given_to("rollout.strategy", checkpoint):
                job.strategy.load_state_dict(state["strategy"])
            job.cursor.position = int(state["prompts"])
            with _given_to("rewards", checkpoint):
                job.rewards.load_state_dict(state["rewards"])
            for i, controller in enumerate(job.controllers):
                with _given_to(f"methods.{i}", checkpoint):
                    controller.load_state_dict(state["controllers"].get(str(i), {}))
            # Last, because what was loaded before may have drawn random numbers.
            device, steps = job.accelerator.device, int(state["steps"])
            if said := restore_random(trainer, job.learner.ranks, device, seed=job.recipe.seed, step=steps):
                self._log(f"note: {said}")
            return LoopState(
                steps=int(state["steps"]),
                tokens=int(state["tokens"]),
                began=time.monotonic() - float(state["seconds"]),
                before=None if state["before"] is None else from_json(state["before"]),
                unfinished=None if state["unfinished"] is None else Unfinished.from_json(state["unfinished"]),
                last=None if (last := state.get("last")) is None else (last[0], last[1]),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the state in checkpoint {checkpoint} does not fit this recipe or version of opd ({error!r}); resume "
                "with those that wrote it, or begin a new run."
            ) from error


def _names(recipe: Recipe) -> dict[str, list[str]]:
    """Names of the plug-ins of a recipe, by group."""
    return {group: [entry["name"] for entry in getattr(recipe, group)] for group in _STATES}


def _check_places(state: Mapping[str, Any], recipe: Recipe, checkpoint: Path) -> None:
    """Refuse to give a plug-in what another one remembered.

    Raises:
        CheckpointError: naming the first place that is another's now.
    """
    for group, names in _names(recipe).items():
        before = state.get("names", {}).get(group, [])  # checkpoints of earlier versions have no names
        for place, (was, now) in enumerate(zip(before, names, strict=False)):
            moved = was != now and (was in names or now in before)  # else one stands in for another, by intent
            if moved and state[_STATES[group]].get(str(place)):
                raise CheckpointError(
                    f"{group}.{place} is {now}, but checkpoint {checkpoint} has what {was} remembered there; keep the "
                    f"order of {group}, new ones last, or begin a new run."
                )


@contextmanager
def _given_to(where: str, checkpoint: Path) -> Iterator[None]:
    """Name the plug-ins that cannot take the state which they have in a checkpoint.

    Raises:
        CheckpointError: with what went wrong in them.
    """
    try:
        yield
    except OpdError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the load_state_dict of {where} cannot take its state in checkpoint {checkpoint} ({error!r}); resume with "
            "the recipe, the plug-ins and the version of opd that wrote it, or begin a new run."
        ) from error
