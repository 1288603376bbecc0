"""Rollout engines, each opened once in a run of the tests: vLLM takes seconds to start."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ports import held_port
from sglang_rollouts import SglangRollouts
from sglang_server import SglangServer
from vllm_rollouts import VllmServer

from opd.config import parse_settings
from student.rollout.engine import ROLLOUT_ENGINES, EngineSetup, RolloutEngine
from student.rollout.requests import RolloutSpec

Opened = Callable[[str], RolloutEngine]


@pytest.fixture(scope="session")
def vllm_server(world: Path) -> Iterator[VllmServer]:
    """A vLLM server on the student of the test world."""
    server = VllmServer(world / "student", held_port())
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def sglang_server(world: Path) -> Iterator[SglangServer | SglangRollouts]:
    """An SGLang server on the student of the test world; where SGLang is not installed, the stand-in for one."""
    if importlib.util.find_spec("sglang") is None:
        stand_in = SglangRollouts(world / "student")
        yield stand_in
        stand_in.close()
        return
    server = SglangServer(world / "student", held_port())
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def student(world: Path) -> tuple[Any, Any]:
    """The student of the test world and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = world / "student"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def opened(world: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Opens each engine at its first use, on the student of the test world."""
    engines: dict[str, RolloutEngine] = {}

    def settings(name: str) -> dict[str, Any]:
        if not name.endswith("_server"):
            return {"name": name}
        url = request.getfixturevalue(name).url
        return {"name": name, "endpoints": [url], "folder": str(tmp_path_factory.mktemp(name))}

    def get(name: str) -> RolloutEngine:
        if name not in engines:
            if name.startswith("vllm") and importlib.util.find_spec("vllm") is None:
                pytest.skip("vLLM is not installed here; `make engines` runs this in an environment of its own")
            torch.set_num_threads(1)
            cls = ROLLOUT_ENGINES.load(name)
            engine: RolloutEngine = cls(parse_settings(cls.settings_type, settings(name)))
            engine.open(setup_of(world))
            engines[name] = engine
        return engines[name]

    yield get
    for engine in engines.values():
        engine.close()


def setup_of(world: Path) -> EngineSetup:
    """The student of the test world, loaded anew."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = str(world / "student")
    tokenizer = AutoTokenizer.from_pretrained(path)
    spec = RolloutSpec(seed=7, batch_rows=4, candidates=4, valid_vocab=len(tokenizer), max_prompt_tokens=40)
    return EngineSetup(AutoModelForCausalLM.from_pretrained(path), tokenizer, spec, path)


@pytest.fixture
def make_engine(opened: Opened, world: Path) -> Callable[..., Any]:
    """make_engine(name, **spec) -> the engine with the student's first weights, synced as version 3."""

    def make(name: str, **spec: Any) -> RolloutEngine:
        engine, fresh = opened(name), setup_of(world)
        engine.setup = replace(fresh, spec=replace(fresh.spec, **spec))
        engine.sync(engine.setup.model.named_parameters(), 3)
        engine.take()
        return engine

    return make
