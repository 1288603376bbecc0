"""Whole trainings that sample with servers: in turn, beside learning, and two ranks with one server."""

import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ports import held_port
from sglang_rollouts import SglangRollouts
from vllm_rollouts import VllmServer

from student.loop import train
from student.recipe import Recipe

_VLLM = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this"),
]


@pytest.fixture(params=["sglang_server", pytest.param("vllm_server", marks=_VLLM)])
def engine(request: pytest.FixtureRequest, world: Path) -> Iterator[dict[str, Any]]:
    """A server, real or a stand-in for SGLang, as a recipe names it."""
    server: SglangRollouts | VllmServer
    if request.param == "sglang_server":
        server = SglangRollouts(world / "student")
    else:
        server = VllmServer(world / "student", held_port())
    try:
        if isinstance(server, VllmServer):
            server.wait()
        yield {"name": request.param, "endpoints": [server.url], "mismatch_limit": 1e-3}
    finally:
        server.close()


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
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness"] if staleness else 0 for line in lines] == [min(step, staleness) for step in range(4)]
    # Of the weights that sampled, which the server says it holds: those of other steps are much further away.
    assert all(line["mismatch/log_ratio"] < 1e-4 for line in lines)
    # Beside learning a load is counted in whichever step the learner is at.
    assert sum(line.get("engine/weights_loaded", 0) for line in lines) == 4 - staleness
    assert not run.with_name(f"{run.name}.rollout").exists()


def test_a_run_samples_each_step_with_the_weights_that_it_says(
    make_recipe: Callable[..., Recipe], engine: dict[str, Any]
) -> None:
    for staleness in (0, 1):
        run = recipe(make_recipe, engine, staleness, f"lag-{staleness}")
        train(run)
        check(run.run, staleness)


@pytest.mark.slow
def test_two_ranks_share_a_server_which_loads_each_version_once(
    make_recipe: Callable[..., Recipe], engine: dict[str, Any], two_ranks: Callable[[Recipe], None]
) -> None:
    run = recipe(make_recipe, engine, 0, "two")
    two_ranks(run)
    check(run.run, 0)
