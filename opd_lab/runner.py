"""Runs an experiment: serves its teachers, measures premises, sweeps learning rates, trains, and measures the results.

All of it can be interrupted and resumed.
"""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from opd.errors import CancelledError, ConfigError
from opd.files import write_whole
from opd.signals import NOTICES
from opd_lab import premises
from opd_lab.answers import write_all
from opd_lab.evaluate import ModelGrade, as_json, grade_model, grade_run, grades, read_level, read_models
from opd_lab.experiment import Arm, Experiment
from opd_lab.plan import ExperimentPlan
from opd_lab.results import arm_json, choose_rate, collect, sizes
from opd_lab.runs import Run, train_run
from opd_lab.stored import FORMAT
from opd_lab.verdicts import judge
from opd_lab.world import WorldBuild, WorldModels, find_world, open_world, served

Log = Callable[[str], None]
Task = WorldBuild | Run | ModelGrade


def make_plan(
    experiment: Experiment, root: Path, form: str, *, jobs: int = 1, log: Log = lambda line: None
) -> ExperimentPlan:
    """The plan of an experiment with its worlds; missing worlds are built, `jobs` of them at a time."""
    draft = ExperimentPlan(experiment, form, root, {})
    builds = [WorldBuild.of(root, experiment, world, form) for world in draft.worlds]
    _work([build for build in builds if not build.done], jobs, log)
    return replace(draft, models={world: open_world(root, experiment, world, form) for world in draft.worlds})


def find_plan(experiment: Experiment, root: Path, form: str) -> ExperimentPlan:
    """The plan of an experiment with its worlds as they are; results name their keys.

    Raises:
        DataError: when a world is missing or not complete.
    """
    draft = ExperimentPlan(experiment, form, root, {})
    return replace(draft, models={world: find_world(root, experiment, world, form) for world in draft.worlds})


def run_experiment(
    plan: ExperimentPlan, *, jobs: int, arms: Sequence[str] = (), log: Log = lambda line: None
) -> dict[str, Any]:
    """Do all runs of an experiment that are not done yet, write results.json, and return the results.

    Args:
        plan: the experiment with its worlds.
        jobs: number of parallel runs, each in a process with one thread; 1 runs them in this process. The same number
            of teacher servers is started, because one cannot keep up with two students.
        arms: names of the arms to run; all if empty.
        log: called with a line of progress whenever a task ends.

    Raises:
        ConfigError: when another process works on the same experiment in the same root.
        OpdError: when a run fails. The others are stopped, and running the experiment again continues them.
    """
    experiment = plan.experiment
    chosen = [arm for arm in experiment.arms if not arms or arm.name in arms]
    with _alone(plan.folder):
        premises.measure_premises(plan, log)
        for world in plan.worlds:
            with served(plan.models[world], experiment.served, plan.world_folder(world), replicas=jobs) as addresses:
                here = replace(plan, addresses=addresses)
                write_all(here, world, chosen, log)
                if world == plan.tuning_replicate.world:
                    tuned = [experiment.arm(arm.same_rate_as) if arm.same_rate_as else arm for arm in chosen]
                    unique = {arm.name: arm for arm in tuned}
                    _work([run for arm in unique.values() for run in here.tuning(arm)], jobs, log)
                runs = [run for run in seed_runs(here, chosen) if run.replicate.world == world]
                _work([*grades(here, world), *runs], jobs, log, graded=True)
        data = read_results(plan)
        write_whole(plan.folder / "results.json", json.dumps(data, indent=1) + "\n")
    return data


def read_results(plan: ExperimentPlan) -> dict[str, Any]:
    """The results of all finished runs as JSON values; nothing is run."""
    models, results, findings = read_models(plan), collect(plan), premises.read_premises(plan)
    replicates = plan.replicates
    experiment = plan.experiment
    verdicts = [judge(claim, results, models, replicates, findings) for claim in experiment.claims]
    return {
        "format": FORMAT,
        "experiment": experiment.name,
        "form": plan.form,
        "worlds": {
            str(seed): {"name": one.world.preset, "key": one.world.key} for seed, one in sorted(plan.models.items())
        },
        "replicates": [replicate.name for replicate in replicates],
        "planned_runs": len(experiment.arms) * len(replicates),
        "finished_runs": sum(len(arm.seeds) for arm in results),
        "sizes": asdict(sizes(plan)),
        "teachers": _teachers(plan),
        "models": {name: as_json(found) for name, found in models.items()},
        "premises": premises.to_json(findings),
        "arms": [arm_json(arm) for arm in results],
        "claims": [asdict(verdict) for verdict in verdicts],
    }


def _teachers(plan: ExperimentPlan) -> dict[str, dict[str, float]]:
    """Seconds that it took to build each served model, on the machine that built it; mean over worlds."""
    worlds: list[WorldModels] = list(plan.models.values())
    return {
        name: {"seconds": sum(world.model(name).seconds for world in worlds) / len(worlds)}
        for name in plan.experiment.served
    }


def seed_runs(plan: ExperimentPlan, arms: Iterable[Arm]) -> list[Run]:
    """Runs of all arms at their chosen rates, ordered by replicate, so that an interrupted lab has complete pairs."""
    rates = {arm.name: choose_rate(plan, arm)[0] for arm in arms}
    return [plan.run(arm, replicate, rates[arm.name]) for replicate in plan.replicates for arm in arms]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ConfigError(
            f"another process is running the experiment in {folder}; wait for it, or give another folder with --root."
        ) from error


def _work(tasks: Sequence[Task], jobs: int, log: Log, *, graded: bool = False) -> None:
    """Build worlds, train runs (and, with `graded`, grade their last weights) and grade models, `jobs` at a time."""
    waiting = [task for task in tasks if not isinstance(task, Run) or not _finished(task, graded)]
    left = len(waiting)
    # Logged here, because workers have no log.
    for task in waiting:
        if isinstance(task, Run) and task.abandoned:
            log(f"{task.name} was stopped before its first checkpoint and starts from the beginning")

    def report(task: Task) -> None:
        nonlocal left
        left -= 1
        log(f"{_outcome(task)}; {left} of {len(waiting)} left")

    if jobs == 1 or len(waiting) < 2:
        for task in waiting:
            report(_do(task, graded))
        return
    # Workers are forked from a server process, because a forked child of a process with gRPC threads may hang. The
    # server loads torch once for the workers of all calls, which takes longer than many runs of the short form.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["student.job.session"])
    _start_server()
    stop = context.Event()
    pool = ProcessPoolExecutor(min(jobs, len(waiting)), mp_context=context, initializer=_enter_worker, initargs=(stop,))
    try:
        futures: list[Future[Task]] = [pool.submit(_do_unless_stopped, task, graded) for task in waiting]
        for future in as_completed(futures):
            report(future.result())
    except BaseException:
        # The executor hands tasks to its workers ahead of time. Without the event they would start after the stop.
        stop.set()
        for worker in multiprocessing.active_children():
            worker.terminate()  # SIGTERM lets a run save its state and stop
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_server() -> None:
    """Start the server process of the workers, if it does not run yet.

    It inherits a mask without Ctrl-C, which a terminal sends to it too: while it imports torch, it would end with a
    traceback. Notices of a scheduler, which may go to all processes too, would end it.
    """
    resource_tracker.ensure_running()  # which unblocks the signal when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *NOTICES})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _finished(run: Run, graded: bool) -> bool:
    return run.done and (not graded or read_level(run) is not None)


def _do(task: Task, graded: bool) -> Task:
    if isinstance(task, WorldBuild):
        task.build()
        return task
    if isinstance(task, ModelGrade):
        grade_model(task)
        return task
    train_run(task)
    if graded:
        grade_run(task)
    return task


def _outcome(task: Task) -> str:
    if isinstance(task, WorldBuild):
        return f"world {task.folder.name} has been built"
    if isinstance(task, ModelGrade):
        return f"{task.name} has been evaluated on the prompts of {task.replicate.name}"
    level = read_level(task)
    accuracy = task.summary()["after"]["accuracy"] if level is None else level.accuracy
    return f"{task.name}: accuracy {accuracy:.3f}" + ("" if level is None else f", greedy {level.greedy:.3f}")


_STOPS: list[Event | threading.Event] = []
"""In a worker: the events that end its work. The lab sets one, and the worker the other when the lab is gone."""
_WORKING = threading.Lock()
"""In a worker: held while it works on a task."""


def _enter_worker(stop: Event) -> None:
    _STOPS[:] = [stop, threading.Event()]
    # A session of its own: the terminal's Ctrl-C would reach a run here and again through the lab, as a second signal.
    os.setsid()
    threading.Thread(target=_end_with_lab, daemon=True).start()


def _end_with_lab() -> None:
    """End this worker when the lab has ended, even if it was killed; a run in progress saves its state first."""
    lab = multiprocessing.parent_process()
    assert lab is not None  # workers are its children
    lab.join()
    _STOPS[-1].set()  # first, so that a run handed over ahead of time is not begun after the one that stops
    os.kill(os.getpid(), signal.SIGTERM)
    with _WORKING:
        os._exit(128 + signal.SIGTERM)


def _do_unless_stopped(task: Task, graded: bool) -> Task:
    with _WORKING:
        if any(stop.is_set() for stop in _STOPS):
            raise CancelledError("a run was not started, because the lab was stopped")
        return _do(task, graded)
