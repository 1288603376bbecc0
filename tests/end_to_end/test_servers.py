"""Whole trainings that sample with servers: in turn, beside learning, and two ranks with one server."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
import gloo_transfer
import pytest
from engine_process import EngineProcess
from ports import held_port
from run_records import metrics_of
from sglang_rollouts import SglangRollouts
from sglang_server import SglangServer
from slow_cases import slow
from vllm_rollouts import VllmServer
from waiting import wait_until

from student.job.session import train
from student.rollout.servers import transfer
from student.run.checkpoint import latest_checkpoint
from student.settings.model import LoraSettings
from student.settings.recipe import Recipe

_VLLM = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this"),
]


_SGLANG = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here; `make sglang` runs this"),
]
_KINDS: dict[str, Callable[[Path], Any]] = {
    "stand_in": SglangRollouts,
    "sglang": lambda folder: SglangServer(folder, held_port()),
    "vllm": lambda folder: VllmServer(folder, held_port()),
}


@pytest.fixture(params=["stand_in", pytest.param("sglang", marks=_SGLANG), pytest.param("vllm", marks=_VLLM)])
def engine(request: pytest.FixtureRequest, world: Path) -> Iterator[dict[str, Any]]:
    """A server, real or a stand-in for SGLang, as a recipe names it."""
    with closing(_KINDS[request.param](world / "student")) as server:
        if isinstance(server, EngineProcess):
            server.wait()
        name = "vllm_server" if request.param == "vllm" else "sglang_server"
        yield {"name": name, "endpoints": [server.url], "mismatch_limit": 1e-3}


def recipe(make_recipe: Callable[..., Recipe], engine: dict[str, Any], staleness: int, name: str) -> Recipe:
    found = make_recipe(
        objective=[{"name": "opd", "payload": "gather", "k": 8, "importance_cap": 2.0}],
        eval={"prompts": 0},
        train={"steps": 4, "max_staleness": staleness, "learning_rate": 1e-2},
        rollout={"engine": engine},
    )
    return found.model_copy(update={"run": found.run.with_name(name)})


def check(run: Path, staleness: int) -> None:
    """That each step was sampled with the weights that it says, and that none was loaded twice."""
    lines = metrics_of(run)
    assert [line["staleness"] if staleness else 0 for line in lines] == [min(step, staleness) for step in range(4)]
    # Of the weights that sampled, which the server says it holds: those of other steps are much further away.
    assert all(line["mismatch/log_ratio"] < 1e-4 for line in lines)
    # Beside learning a load is counted in whichever step the learner is at.
    assert sum(line.get("engine/weights_loaded", 0) for line in lines) == 4 - staleness
    assert not run.with_name(f"{run.name}.rollout").exists()


@pytest.mark.parametrize("staleness", [1, *slow(0)])
def test_a_run_samples_each_step_with_the_weights_that_it_says(
    make_recipe: Callable[..., Recipe], engine: dict[str, Any], staleness: int
) -> None:
    run = recipe(make_recipe, engine, staleness, "lag")
    train(run)
    check(run.run, staleness)


class TestWithSglang:
    pytestmark = _SGLANG

    def test_student_and_teacher_may_both_be_sglang_servers(
        self, make_recipe: Callable[..., Recipe], world: Path, serve: Callable[..., Any]
    ) -> None:
        with (
            closing(_KINDS["sglang"](world / "teacher")) as taught,
            closing(_KINDS["sglang"](world / "student")) as own,
        ):
            taught.wait()
            own.wait()
            option = ("--engine-option", f"url={taught.url}")
            teacher = serve("--engine", "sglang", *option, "--model", f"teacher={world / 'teacher'}")
            run = make_recipe(
                objective=[{"name": "opd", "payload": "topk", "k": 8}],
                eval={"prompts": 0},
                train={"steps": 3, "learning_rate": 1e-2},
                teachers={"endpoints": [teacher.address]},
                rollout={"engine": {"name": "sglang_server", "endpoints": [own.url], "mismatch_limit": 1e-3}},
            )
            train(run)
        assert all(line["mismatch/log_ratio"] < 1e-4 and line["loss/opd"] > 0 for line in metrics_of(run.run))


@pytest.mark.engine
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this")
def test_a_run_whose_weights_travel_by_vllms_own_transfer_samples_with_those_that_it_says(
    make_recipe: Callable[..., Recipe], world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo in the place of NCCL, which a CPU does not have."""
    gloo_transfer.install(monkeypatch.setattr)
    monkeypatch.setattr(transfer, "check_sender", lambda device: None)
    server = VllmServer(world / "student", held_port(), adapters=False, transfer=True)
    try:
        server.wait()
        entry = {"name": "vllm_server", "endpoints": [server.url], "mismatch_limit": 1e-3, "transfer": "nccl"}
        for staleness in (0, 1):
            run = recipe(make_recipe, entry, staleness, f"sent-{staleness}")
            train(run)
            check(run.run, staleness)
    finally:
        server.close()


@pytest.mark.slow
def test_two_ranks_whole_or_sharded_share_a_server_which_loads_each_version_once(
    make_recipe: Callable[..., Recipe],
    engine: dict[str, Any],
    two_ranks: Callable[..., None],
    request: pytest.FixtureRequest,
) -> None:
    """A sharded run is the unsharded one, and adapters travel alone or merged."""
    whole = recipe(make_recipe, engine, 0, "whole")

    def sharded(name: str, lora: LoraSettings | None = None, *, merged: bool = False, staleness: int = 0) -> Recipe:
        changes = {
            "run": whole.run.with_name(name),
            "train": whole.train.model_copy(update={"sharding": "fsdp", "max_staleness": staleness}),
            "rollout": whole.rollout.model_copy(update={"engine": {**whole.rollout.engine, "merge_adapters": merged}}),
            "model": whole.model.model_copy(update={"lora": lora}),
        }
        return whole.model_copy(update=changes)

    runs = [whole, sharded("shards"), sharded("merged", LoraSettings(rank=4), merged=True)]
    if request.node.callspec.params["engine"] == "stand_in":  # the others are started without adapters
        runs.insert(0, sharded("adapters", LoraSettings(rank=4)))
    # Beside learning ranks wait for each other before a version goes to the servers that they share.
    runs += [recipe(make_recipe, engine, 1, "whole-ahead"), sharded("shards-ahead", staleness=1)]
    two_ranks(*runs)
    for run in runs:
        check(run.run, run.train.max_staleness)
        assert sum(line.get("engine/rows_reissued", 0) for line in metrics_of(run.run)) == 0
    for mine, theirs in zip(metrics_of(whole.run), metrics_of(whole.run.with_name("shards")), strict=True):
        for name in ("loss/opd", "grad_norm", "response_tokens"):
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_killed_while_ranks_sample_with_a_server_ends_the_other_and_the_run_goes_on(
    make_recipe: Callable[..., Recipe],
    start_ranks: Callable[..., list[forked.Program]],
    two_ranks: Callable[..., None],
    world: Path,
    lost: int,
) -> None:
    """Ranks wait for each other before a server is given the next version; rank 0 keeps the count that they wait on."""
    server = SglangRollouts(world / "student")
    try:
        engine = {"name": "sglang_server", "endpoints": [server.url], "mismatch_limit": 1e-3}
        cut = recipe(make_recipe, engine, 1, "cut")

        def until(steps: int) -> Recipe:
            return cut.model_copy(update={"train": cut.train.model_copy(update={"steps": steps})})

        ranks = start_ranks(until(100_000))
        second = cut.run / "checkpoints" / "step-000002"
        wait_until(lambda: second.exists() or any(rank.poll() is not None for rank in ranks), 600)
        server.gate = threading.Event()
        before = server.rows()
        wait_until(lambda: server.rows() > before or any(rank.poll() is not None for rank in ranks), 600)
        ranks[lost].kill()  # rows of a step are under way, and no rank has the next one
        other = ranks[1 - lost]
        assert other.wait(60) == 21  # a gate, or a collective beside it, would wait without limit
        assert f"error: rank {lost} ended: it reported no error, so it was killed" in other.output()[1]
        server.gate.set()
        last = latest_checkpoint(cut.run / "checkpoints")
        assert last is not None
        steps = int(last.name[5:]) + 2
        two_ranks(until(steps), "--resume")
        lines = metrics_of(cut.run)
        assert lines[-1]["step"] == steps
        assert all(line["mismatch/log_ratio"] < 1e-4 for line in lines)
    finally:
        if server.gate is not None:
            server.gate.set()
        server.close()
