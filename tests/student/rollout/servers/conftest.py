"""SGLang's stand-in on the student of the test world, and engines on it and on vLLM."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from other_weights import train_adapters
from server_engines import engine_on
from sglang_rollouts import SglangRollouts

from opd.config import parse_settings
from student.model.lora import add_lora
from student.rollout.engine import ROLLOUT_ENGINES, EngineSetup
from student.rollout.requests import RolloutSpec
from student.rollout.servers.engine import ServersEngine
from student.settings.model import LoraSettings


@pytest.fixture
def start(world: Path) -> Iterator[Callable[..., SglangRollouts]]:
    """Start a server on the student of the test world."""
    started: list[SglangRollouts] = []

    def make(port: int = 0) -> SglangRollouts:
        started.append(SglangRollouts(world / "student", port))
        return started[-1]

    yield make
    for server in started:
        server.close()


@pytest.fixture
def open_engine(world: Path, tmp_path: Path) -> Iterator[Callable[..., ServersEngine]]:
    """Open an engine on servers, see `engine_on`."""
    opened: list[ServersEngine] = []

    def make(*servers: SglangRollouts, **settings: Any) -> ServersEngine:
        opened.append(engine_on(servers, world / "student", settings.pop("folder", tmp_path / "weights"), **settings))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def make(world: Path, tmp_path: Path) -> Iterator[Callable[..., ServersEngine]]:
    """An engine on servers of a kind, for a student with their first weights; one of LoRA where a rank is given."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened: list[ServersEngine] = []
    path = str(world / "student")

    def make(
        *servers: Any, name: str = "vllm_server", rank: int = 0, candidates: int = 3, **settings: Any
    ) -> ServersEngine:
        torch.set_num_threads(1)
        cls = ROLLOUT_ENGINES.load(name)
        entry = {"name": name, "endpoints": [server.url for server in servers], "folder": str(tmp_path / "w")}
        engine: ServersEngine = cls(parse_settings(cls.settings_type, entry | settings))
        tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
        if rank:
            add_lora(model, LoraSettings(rank=rank), base=path)
            train_adapters(model)
        opened.append(engine)
        engine.open(EngineSetup(model, tokenizer, RolloutSpec(7, 4, candidates, len(tokenizer), 400), path))
        return engine

    yield make
    for engine in opened:
        if hasattr(engine, "_folder"):
            engine.close()
