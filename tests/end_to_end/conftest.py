"""Recipes and runs of the test world against a real server process."""

import contextlib
import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import yaml
from ports import held_port

from opd.config import parse_settings
from opd.errors import CancelledError
from student.job.loop import Loop
from student.job.session import train
from student.learning.learner import Learner
from student.settings.recipe import Recipe


def weights_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of every tensor file of a checkpoint."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {str(f.relative_to(checkpoint)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


@pytest.fixture
def hashes() -> Callable[[Path], dict[str, str]]:
    return weights_of


@pytest.fixture
def recipe_data(world: Path, teacher: Any, tmp_path: Path) -> dict[str, Any]:
    return {
        "run": str(tmp_path / "run"),
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [teacher.address], "default": "teacher"},
        "prompts": {"task": "addition", "options": {"digits": 2}},
        "rollout": {"prompts_per_step": 8, "max_new_tokens": 8, "max_prompt_tokens": 32},
        "objective": [{"name": "opd", "payload": "gather", "k": 8}],
        "train": {"steps": 4, "learning_rate": 1e-3, "checkpoint_every": 1, "keep_checkpoints": 9, "threads": 1},
        "eval": {"prompts": 0},
    }


@pytest.fixture
def make_recipe(recipe_data: dict[str, Any]) -> Callable[..., Recipe]:
    def make(**changes: Any) -> Recipe:
        data = {**recipe_data}
        for key, value in changes.items():
            data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) and key != "prompts" else value
        return parse_settings(Recipe, data)

    return make


@pytest.fixture(scope="session")
def roomy_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `student` and `teacher`: random models with room for an episode."""
    from opd_lab.tiny.model import make_model
    from opd_lab.tiny.plans import Shape
    from opd_lab.tiny.tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer()
    shape = Shape(hidden=32, layers=1, heads=2, vocabulary=len(tokenizer))
    for seed, name in enumerate(("student", "teacher")):
        make_model(shape, seed, max_length=4096).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def game_training(roomy_models: Path, serve: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """What short trainings in games share: models with room for long observations, and their teacher, served."""
    teacher = serve("--model", f"teacher={roomy_models / 'teacher'}", "--deterministic")

    def changes(*, prompts: int, steps: int, tokens: int, **episodes: Any) -> dict[str, Any]:
        """Recipe settings: `prompts` a step, `tokens` of an episode's history, `episodes` of rollout.episodes."""
        return {
            "model": {"path": str(roomy_models / "student")},
            "teachers": {"endpoints": [teacher.address], "default": "teacher"},
            "rollout": {
                "prompts_per_step": prompts,
                "max_new_tokens": tokens,
                "max_prompt_tokens": tokens,
                "episodes": {"turn_tokens": 8, **episodes},
            },
            "train": {"steps": steps},
            "eval": {"prompts": 1},
        }

    return changes


_SUPPORT = Path(__file__).parents[1] / "support"


def _training(folder: Path, recipes: Sequence[Recipe | str]) -> list[str]:
    """What Python is told in order to train recipes one after the other; strings are flags of `opd train`."""
    jobs = [recipe for recipe in recipes if isinstance(recipe, Recipe)]
    paths = [folder / f"{number}-{job.run.name}.yaml" for number, job in enumerate(jobs)]
    for path, job in zip(paths, jobs, strict=True):
        path.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    program = ["-m", "opd.cli", "train"] if len(paths) == 1 else [str(_SUPPORT / "run_recipes.py")]
    return [*program, *map(str, paths), *(part for part in recipes if isinstance(part, str))]


def _environment() -> dict[str, str]:
    """Of ranks on this machine that find the plug-ins of the tests."""
    searched = os.pathsep.join([str(_SUPPORT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": searched}


@pytest.fixture
def killed_and_resumed(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """Train in an environment that kills its process once, resume, and meet the weights of a calm run, which is given.

    The environment is a `Deadly` one of tests/support/environments.py, by its class.
    """

    def run(environment: str, options: dict[str, Any], **changes: Any) -> Recipe:
        cut, flag = tmp_path / "cut", tmp_path / "killed"
        when = {"after": str(cut / "checkpoints" / "step-000001"), "flag": str(flag)}
        changes["prompts"] = {"task": f"tests.support.environments:{environment}", "options": {**options, **when}}
        recipe, calm = (make_recipe(**changes, run=str(folder)) for folder in (cut, tmp_path / "calm"))
        # As long as a test may take: a run that begins many machines waits for a busy computer.
        killed = forked.run([sys.executable, *_training(tmp_path, [recipe])], timeout=1800, cwd=_SUPPORT.parents[1])
        assert killed.returncode == -signal.SIGKILL and flag.exists(), killed.stderr
        ended = [Path(train(recipe, resume=True)["checkpoint"]), Path(train(calm)["checkpoint"])]
        assert weights_of(ended[0]) == weights_of(ended[1])
        return calm

    return run


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., forked.Program]]:
    """Start `opd train` on two ranks (torchrun, gloo) in a group of its own; it ends with the test.

    torchrun is forked from the warm process; the ranks that it starts are not. Several recipes are trained one after
    the other by the same two processes; one whose run exists is resumed.
    """
    started: list[forked.Program] = []

    def start(*recipes: Recipe | str) -> forked.Program:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, *_training(tmp_path, recipes)]
        started.append(forked.Program(command, env=_environment(), start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(120)


@pytest.fixture
def interrupted() -> Callable[..., dict[str, Any]]:
    """Train a recipe that is stopped twice by a signal and resumed each time; gives the summary of the end."""

    def stopping(owner: Any, name: str, at: int, recipe: Recipe, resume: bool) -> None:
        original, calls = getattr(owner, name), []

        def stopped(self: Any, *arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == at:
                raise CancelledError("stopped by a signal")
            return original(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, stopped)
            with pytest.raises(CancelledError, match="stopped after"):
                train(recipe, resume=resume)

    def run(recipe: Recipe, *, update: int = 2) -> dict[str, Any]:
        # When the step has been planned, sampled and composed, and then when it has been updated from.
        stopping(Learner, "update", update, recipe, False)
        stopping(Loop, "_follow_up", 1, recipe, True)
        return train(recipe, resume=True)

    return run


@pytest.fixture
def start_ranks(tmp_path: Path) -> Iterator[Callable[..., list[forked.Program]]]:
    """Start training recipes on two ranks, in two forked processes that end with the test.

    No launcher looks after them, as torchrun would, which ends all when one has ended.
    """
    started: list[forked.Program] = []

    def start(*recipes: Recipe | str) -> list[forked.Program]:
        command = [sys.executable, *_training(tmp_path, recipes)]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port())}
        shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **address}
        environments = [_environment() | shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
        started.extend(forked.Program(command, env=environment) for environment in environments)
        return started[-2:]

    yield start
    for process in started:
        process.kill()
        process.wait(120)


@pytest.fixture
def two_ranks(start_ranks: Callable[..., list[forked.Program]]) -> Callable[..., list[forked.Program]]:
    """Train recipes on two ranks to their end; see `start_ranks`."""

    def run(*recipes: Recipe | str) -> list[forked.Program]:
        programs = start_ranks(*recipes)
        forked.finish(programs, 600)
        return programs

    return run
