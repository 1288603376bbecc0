"""Run an experiment: serve its teachers, choose learning rates, train all seeds, evaluate models; all resumable."""

import json
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from opd.errors import CancelledError
from student.lab.answers import write_answers
from student.lab.evaluate import grade_models, grade_runs, read_models
from student.lab.experiment import Arm, Experiment
from student.lab.plan import Plan
from student.lab.results import choose_rate, collect, judge, to_json
from student.lab.runs import Run, train_run
from student.lab.world import Cast, served

Say = Callable[[str], None]


def run_experiment(
    experiment: Experiment,
    cast: Cast,
    root: Path,
    *,
    form: str,
    jobs: int,
    arms: Sequence[str] = (),
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Do all runs of an experiment that are not done yet and return its results.

    Args:
        experiment: what to run.
        cast: the models.
        root: folder of the lab.
        form: "full" or "quick".
        jobs: runs at a time, each in a process with one thread; 1 runs them in this process. As many servers are
            started: one alone cannot keep up with two students.
        arms: restrict to these arms; all when empty.
        say: called with a line for people whenever a run ends.

    Raises:
        OpdError: when a run fails; the others are stopped, and running the experiment again goes on.
    """
    plan = Plan(experiment, form, root, cast)
    chosen = [arm for arm in experiment.arms if not arms or arm.name in arms]
    with served(cast, experiment.served, plan.folder, replicas=jobs) as addresses:
        plan = Plan(experiment, form, root, cast, addresses)
        if experiment.answers_of is not None:
            write_answers(plan, say)
        _train([run for arm in chosen for run in plan.tuning(arm)], jobs, say)
        runs = seed_runs(plan, chosen)
        _train(runs, jobs, say)
        grade_runs(plan, runs, say)
        models = grade_models(plan, say)
    results = collect(plan)
    verdicts = [judge(experiment, claim, results, models) for claim in experiment.claims]
    data = to_json(plan, results, verdicts, models)
    (plan.folder / "results.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def read_results(experiment: Experiment, cast: Cast, root: Path, *, form: str) -> dict[str, Any]:
    """Results of what is finished, without running anything."""
    plan = Plan(experiment, form, root, cast)
    models = read_models(plan)
    results = collect(plan)
    return to_json(plan, results, [judge(experiment, claim, results, models) for claim in experiment.claims], models)


def seed_runs(plan: Plan, arms: Iterable[Arm]) -> list[Run]:
    """Runs of all seeds at the chosen rates, seed after seed, so that an interrupted lab has whole pairs."""
    rates = {arm.name: choose_rate(plan, arm)[0] for arm in arms}
    return [plan.run(arm, seed, rates[arm.name]) for seed in plan.seeds for arm in arms]


def _train(runs: Sequence[Run], jobs: int, say: Say) -> None:
    waiting = [run for run in runs if not run.done]

    def tell(run: Run) -> None:
        left = sum(not other.done for other in waiting)
        after = run.summary()["after"]
        kl = "" if after["reverse_kl"] is None else f", reverse KL {after['reverse_kl']:.4f}"
        say(f"{run.folder}: accuracy {after['accuracy']:.3f}{kl}; {left} of {len(waiting)} runs left")

    if jobs == 1 or len(waiting) < 2:
        for run in waiting:
            tell(train_run(run))
        return
    # Spawned, because a forked child of a process with gRPC threads may hang. Workers are kept for all runs: loading
    # torch takes longer than many a run of the short form.
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    pool = ProcessPoolExecutor(min(jobs, len(waiting)), mp_context=spawn, initializer=_enter_worker, initargs=(stop,))
    try:
        for future in as_completed([pool.submit(_train_unless_stopped, run) for run in waiting]):
            tell(future.result())
    except BaseException:
        # The executor hands runs to its workers ahead of time; without the event these would begin after the stop.
        stop.set()
        for worker in multiprocessing.active_children():
            worker.terminate()  # SIGTERM lets a run save its state and stop
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_STOPS: list[Event] = []
"""In a worker: the event that ends its work."""


def _enter_worker(stop: Event) -> None:
    _STOPS.append(stop)


def _train_unless_stopped(run: Run) -> Run:
    if any(stop.is_set() for stop in _STOPS):
        raise CancelledError(f"{run.folder} was not begun: the lab was stopped.")
    return train_run(run)
