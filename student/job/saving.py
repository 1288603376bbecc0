"""Saves and restores a run: the state of the loop between steps, and the checkpoint of every part that has state."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.errors import CheckpointError, RunFolderError
from student.data.outcome import Outcome
from student.data.report import EvalReport
from student.job.evaluation import from_json, to_json
from student.job.job import Job
from student.model.ranks import ALONE
from student.model.sharding import mesh_of
from student.run.beside import Beside
from student.run.checkpoint import save_checkpoint
from student.run.folder import RunFolder
from student.run.model_folder import model_parts
from student.run.space import Space
from student.state.named_states import load_states, states_of
from student.state.parts import Part
from student.state.random_state import begin_random, random_parts, random_state, restore_random
from student.state.state_io import check_state, load_state, state_parts


@dataclass
class Unfinished:
    """A step whose updates are done but what follows them is not; saved if the run stops there.

    Attributes:
        metrics: metrics of the step so far.
        outcomes: outcomes of the step's rows on all ranks.
        seconds: time of the step's stages so far, by name; the running clock adds to this very dict.
        acted: names of the controllers that have acted on the weights, see `student.state.named_states`.
        observed: whether the strategy, terms, rewards and controllers have seen the report.
    """

    metrics: dict[str, float]
    outcomes: list[Outcome]
    seconds: dict[str, float] = field(default_factory=dict)
    acted: list[str] = field(default_factory=list)
    observed: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON values, for the checkpoint."""
        outcomes = [outcome.to_dict() for outcome in self.outcomes]
        return {**vars(self), "outcomes": outcomes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Unfinished":
        """The object from the values of `to_json`."""
        return cls(**{**data, "outcomes": [Outcome.from_dict(outcome) for outcome in data["outcomes"]]})


@dataclass
class LoopState:
    """The state of the loop itself between steps.

    Attributes:
        steps: number of steps done; the weights are those after the last of them.
        tokens: response tokens sampled for training, on all ranks.
        began: `time.monotonic()` at which the run would have started without interruptions.
        before: the evaluation before the first step.
        unfinished: the last step, if what follows its updates is not done yet.
        last: metrics and seconds by stage of the last finished step, whose line is written after its checkpoint.
    """

    steps: int
    tokens: int
    began: float
    before: EvalReport | None = None
    unfinished: Unfinished | None = None
    last: tuple[dict[str, float], dict[str, float]] | None = None

    @property
    def acting(self) -> bool:
        """Whether plug-ins act on a step's weights, or change their states by it, and have not all done so."""
        return self.unfinished is not None and not self.unfinished.observed


class Saver:
    """Writes and reads the checkpoints of a run.

    Args:
        job: the job whose state is saved.
        folder: the run folder.
        log: called with a line for the console.
        saved: called when a checkpoint has been written.
    """

    def __init__(
        self, job: Job, folder: RunFolder, log: Callable[[str], None], saved: Callable[[], None] = lambda: None
    ) -> None:
        self._job, self._folder, self._log, self._saved = job, folder, log, saved
        self._beside: Beside | None = None
        if job.recipe.train.async_checkpoints:
            self._beside, self._ranks = Beside(), job.learner.ranks.beside()
            # A fast tokenizer must not be used by two threads at once.
            self._tokenizer = copy.deepcopy(job.tokenizer)
        self._writing = -1  # steps of the checkpoint that is being written in the background
        self._waited, self._failed = 0.0, 0
        # Steps of the newest checkpoint that all ranks know of, and of the newest that this rank knows of: in an
        # outage, rank 0 saves alone.
        self._agreed = self._written = -1

    @property
    def sharded(self) -> bool:
        """Whether the student is sharded, so that no rank can save alone."""
        return self._job.learner.sharded

    def open(self, checkpoint: Path | None) -> LoopState:
        """Restore everything from `checkpoint` and return the loop's state; for None, that of a new run.

        Raises:
            CheckpointError: if the checkpoint is of another recipe, version or seed.
        """
        main = self._job.accelerator.is_main_process
        found = self._job.learner.ranks.gather(checkpoint and checkpoint.name)
        if len(set(found)) > 1:
            raise CheckpointError(
                f"the ranks found different checkpoints ({', '.join(map(str, found))}); all ranks must see the same "
                "run folder."
            )
        begin_random(self._job.recipe.seed, self._job.learner.ranks.index)
        state = LoopState(steps=0, tokens=0, began=time.monotonic())
        if checkpoint is None:
            self._plugin_states()  # raises now rather than at the first checkpoint if a state cannot be saved
        else:
            state = self._restore(checkpoint)
            self._agreed = self._written = state.steps
        if main:
            # Before the first step, even the lines of the first evaluation are written again.
            done = state.steps or -1
            self._folder.cut(done, unfinished=state.unfinished is not None)
            self._folder.keep_recipe(self._job.recipe, state.steps)
        return state

    def save(self, state: LoopState, *, together: bool = True, wait: bool = True) -> Path:
        """Save the state after the last step, unless it has been saved already; returns the checkpoint's folder.

        Args:
            state: the loop's state.
            together: whether all ranks save at the same time; if not, rank 0 saves alone.
            wait: wait until it is written, even with `train.async_checkpoints`.

        Raises:
            RunFolderError: if a rank cannot write; on all ranks that save and wait.
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
            return final  # rank 0 saves
        # In an outage rank 0 may have saved this step alone; the other ranks must then skip it as well.
        written = ranks.gather(self._written)[0] if together else self._written
        if written != state.steps:
            self._folder.flush()
            if self._beside is not None and not wait:
                self._start(self._beside, state)
                self._waited = time.monotonic() - begin
                return final
            keep = self._job.recipe.train.keep_checkpoints
            group = ranks if together else ALONE
            # In an outage the other ranks wait for a teacher and not for this rank, so it must not wait for space.
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
        """Copy what this rank holds, and write it in the background."""
        parts, root, steps = list(self._parts(state, copied=True)), self._folder.checkpoints, state.steps
        keep, then = (
            self._job.recipe.train.keep_checkpoints,
            "let the run continue: it will try again with the next one",
        )
        beside.start(lambda: save_checkpoint(root, steps, parts, keep=keep, ranks=self._ranks, then=then))
        self._writing = steps

    def settle(self, *, patient: bool = True) -> None:
        """Take the result of the checkpoint written in the background; wait for it if `patient`, else skip if not done.

        If it could not be written, all ranks alike log a warning and the run continues with the previous checkpoint.
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
        """Metrics of background writing: seconds that the loop waited, seconds of the last write, and failures."""
        if self._beside is None:
            return {}
        waited, self._waited = self._waited, 0.0
        return {
            "checkpoint/waited_seconds": waited,
            "checkpoint/write_seconds": self._beside.seconds,
            "checkpoint/failed": float(self._failed),
        }

    def outdate(self) -> None:
        """Make the next save write, because the state has changed although the number of steps is the same."""
        self._agreed = self._written = -1

    def _parts(self, state: LoopState, *, copied: bool = False) -> Iterator[Part]:
        """The parts that this rank writes, each gathered in turn; `copied` if they are written in the background."""
        job = self._job
        ranks = job.learner.ranks
        tokenizer, group = (self._tokenizer, self._ranks.group) if copied else (job.tokenizer, None)
        yield from model_parts("model", job.learner.student, tokenizer, ranks, copied=copied)
        for name, values in self._states(state).items():
            yield from state_parts(f"trainer/{name}", values, main=ranks.index == 0, group=group, copied=copied)
        # If a gradient has been begun, which a resumed run computes again, the random state from before it.
        yield from random_parts("trainer", ranks.index, job.learner.random or random_state(job.accelerator.device))

    def _states(self, state: LoopState) -> dict[str, dict[str, Any]]:
        """Everything except the model, by the file that it is written to."""
        job = self._job
        found = {"learner": job.learner.state_dict()}
        if kept := job.local.kept.state_dict():
            found["local"] = kept
        if job.ahead is not None:
            found["ahead"] = job.ahead.state_dict(state.steps)
        found["loop"] = {
            "steps": state.steps,
            "tokens": state.tokens,
            # A duration instead of a point in time, because `time.monotonic()` differs between processes.
            "seconds": time.monotonic() - state.began,
            "seed": job.recipe.seed,
            "before": None if state.before is None else to_json(state.before),
            "unfinished": None if state.unfinished is None else state.unfinished.to_json(),
            "last": state.last,
            "prompts": job.cursor.position,
            **self._plugin_states(),
        }
        return found

    def _plugin_states(self) -> dict[str, dict[str, Any]]:
        """The states of all plug-ins, by the key of the recipe that names them.

        Raises:
            PluginError: if a state cannot be saved.
        """
        job = self._job
        found = {
            "objective": job.learner.objective.state_dict(),
            "rollout.strategy": states_of([job.plugins.strategy]),
            "rewards": job.plugins.rewards.state_dict(),
            "methods": states_of(job.controllers),
        }
        for key, states in found.items():
            for name, state in states.items():
                check_state(f"{key}.{name}", state)
        return found

    def _restore(self, checkpoint: Path) -> LoopState:
        job, trainer, mesh = self._job, checkpoint / "trainer", mesh_of(self._job.learner.student)
        state: dict[str, Any] = load_state(trainer, "loop", mesh)
        try:
            if state["seed"] != job.recipe.seed:
                raise CheckpointError(
                    f"checkpoint {checkpoint} is from a run with seed {state['seed']}, but the recipe has seed "
                    f"{job.recipe.seed}; resume with the recipe of that run."
                )
            job.learner.load_state_dict(load_state(trainer, "learner", mesh))
            if (trainer / "local.json").exists():
                job.local.kept.load_state_dict(load_state(trainer, "local", mesh))
            if job.ahead is not None:
                job.ahead.load_state_dict(load_state(trainer, "ahead", mesh), int(state["steps"]))
            job.learner.objective.load_state_dict(state["objective"])
            load_states([job.plugins.strategy], state["rollout.strategy"], "rollout.strategy")
            job.cursor.position = int(state["prompts"])
            job.plugins.rewards.load_state_dict(state["rewards"])
            load_states(job.controllers, state["methods"], "methods")
            # Last, because loading the rest may have drawn random numbers.
            device, steps = job.accelerator.device, int(state["steps"])
            if said := restore_random(trainer, job.learner.ranks, device, seed=job.recipe.seed, step=steps):
                self._log(f"note: {said}")
            return LoopState(
                steps=int(state["steps"]),
                tokens=int(state["tokens"]),
                began=time.monotonic() - float(state["seconds"]),
                before=None if state["before"] is None else from_json(state["before"]),
                unfinished=None if state["unfinished"] is None else Unfinished.from_json(state["unfinished"]),
                last=None if (last := state["last"]) is None else (last[0], last[1]),
            )
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the state in checkpoint {checkpoint} does not fit this recipe or version of opd ({error!r}); resume "
                "with those that wrote it, or begin a new run."
            ) from error
