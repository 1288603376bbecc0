"""A real vLLM server: its cache after new weights, adapters, weights that it cannot load, and its death."""

import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from other_weights import move, train_adapters
from ports import held_port
from vllm_rollouts import VllmServer

from opd.config import parse_settings
from opd.errors import ConfigError, RolloutEngineError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row, RowKey
from student.learning.lora import add_lora
from student.recipe import LoraSettings
from student.rollout.engine import ROLLOUT_ENGINES, EngineSetup
from student.rollout.servers.engine import ServersEngine
from student.rollout.spec import RolloutSpec

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make engines` runs this"),
]
KILLED = """
import os, signal, sys
from pathlib import Path
from filelock import FileLock
from student.rollout.servers.http import Connection
from student.rollout.servers.server import Server
from student.rollout.servers.settings import ServersSettings
from student.rollout.servers.vllm import VllmDialect

url, folder, label, lock, last = sys.argv[1:]
call = Connection.call
def dying(self, path, body=None):
    if path == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, path, body)
Connection.call = dying
settings = ServersSettings(name="vllm_server", endpoints=[url])
Server(url, VllmDialect(), settings, adapters=False).update(Path(folder), label, FileLock(lock))
"""
PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(6)]


@pytest.fixture
def make(world: Path, tmp_path: Path) -> Iterator[Callable[..., ServersEngine]]:
    """An engine on servers, for a student with the servers' first weights; one of LoRA where a rank is given."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    opened: list[ServersEngine] = []
    path = str(world / "student")

    def make(*servers: VllmServer, rank: int = 0, candidates: int = 3, **settings: Any) -> ServersEngine:
        torch.set_num_threads(1)
        cls = ROLLOUT_ENGINES.load("vllm_server")
        entry = {"name": "vllm_server", "endpoints": [server.url for server in servers], "folder": str(tmp_path / "w")}
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


def sync(engine: ServersEngine, version: int = 1) -> None:
    engine.sync([(n, p) for n, p in engine.setup.model.named_parameters() if p.requires_grad], version)


def plan(samples: int = 2) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=12, temperature=1.0).rows


def ids(rows: list[Row]) -> list[list[int]]:
    return [row.response_ids.tolist() for row in rows]


def check(engine: ServersEngine, rows: list[Row]) -> None:
    """That log-probs are those of the student as it is."""
    for row in rows:
        whole = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = engine.setup.model(whole).logits[0, :-1, : engine.setup.spec.valid_vocab]
        logp = logits.log_softmax(-1).gather(-1, whole[0, 1:, None])[-row.length :, 0]
        np.testing.assert_allclose(row.behaviour_logp, logp.numpy(), atol=1e-3)


def test_a_long_prompt_that_was_seen_with_old_weights_is_read_again(make: Any, vllm_server: VllmServer) -> None:
    long = [PlannedRow(RowKey(1, "u", i), Prompt.make("12+34=" * 60), 4, 1.0) for i in range(2)]
    engine = make(vllm_server)
    sync(engine)
    check(engine, engine.sample(long))
    move(engine.setup.model)
    sync(engine, 2)
    check(engine, engine.sample(long))


def test_adapters_travel_alone_and_their_rows_are_those_of_merged_weights(make: Any, vllm_server: VllmServer) -> None:
    sync(make(vllm_server))  # the first weights under the adapters, whatever other tests left
    engine = make(vllm_server, rank=4)
    for version in (1, 2):
        sync(engine, version)
        assert not (engine._weights.path / "model.safetensors").exists()
        check(engine, engine.sample(plan()))
        with torch.no_grad():
            for parameter in engine.setup.model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.2)
    connection = engine._pool.servers[0].connect()
    assert engine.dialect().holds(connection, adapters=True) == {engine._label}
    connection.close()


def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    make: Any, vllm_server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(vllm_server)
    sync(engine)
    wanted, old = ids(engine.sample(plan())), engine._label
    put = type(engine._folder).put

    def half(folder: Any, tensors: Any, config: str, files: Any) -> Any:
        label, path = put(folder, tensors, config, files)
        whole = (path / files[0]).read_bytes()
        (path / files[0]).write_bytes(whole[: len(whole) // 2])
        return label, path

    move(engine.setup.model)
    with monkeypatch.context() as patch, pytest.raises(RolloutEngineError, match=f"holds weights {old} again"):
        patch.setattr(type(engine._folder), "put", half)
        sync(engine, 2)
    again = make(vllm_server)
    sync(again)
    assert not again.take().get("engine/weights_loaded") and ids(again.sample(plan())) == wanted


@pytest.mark.parametrize("last", ["/update_weight_version", "/collective_rpc", "/resume"])
def test_a_server_that_a_rank_left_paused_when_it_was_killed_is_given_the_weights_and_goes_on(
    make: Any, vllm_server: VllmServer, last: str
) -> None:
    engine = make(vllm_server)
    sync(engine)
    before = {name: p.detach().clone() for name, p in engine.setup.model.named_parameters()}
    move(engine.setup.model)
    packed = engine.pack(list(engine.setup.model.named_parameters()), 2)
    lock = engine._folder.lock(vllm_server.url).lock_file
    words = [vllm_server.url, str(packed.path), packed.label, str(lock), last]
    assert forked.run([sys.executable, "-c", KILLED, *words]).returncode == -signal.SIGKILL
    # Another rank, or the run when it is started again; with "/resume" the server has the new label already, and in the
    # other cases what it holds is what a run goes on with whose last checkpoint is a step older.
    again = make(vllm_server, sync_seconds=120.0, row_seconds=120.0)
    for parameters, version in ((before, 1), (dict(engine.setup.model.named_parameters()), 2)):
        with torch.no_grad():
            for name, parameter in again.setup.model.named_parameters():
                parameter.copy_(parameters[name])
        sync(again, version)
        check(again, again.sample(plan()))


def test_a_server_that_is_killed_and_started_again_gets_the_weights_and_costs_no_row(make: Any, world: Path) -> None:
    port = held_port()
    servers = [VllmServer(world / "student", port, adapters=False)]
    try:
        servers[0].wait()
        many = make(servers[0], candidates=30)  # over its --max-logprobs: the student finds them
        sync(many)
        assert {row.candidates.shape[1] for row in many.sample(plan()) if row.candidates is not None} == {30}
        with pytest.raises(ConfigError, match="start it with --enable-lora"):
            make(servers[0], rank=4)
        engine = make(servers[0], in_flight=1, patience_seconds=600.0)
        move(engine.setup.model)
        sync(engine)
        wanted = ids(engine.sample(plan()))
        told: list[Row] = []

        def on_row(row: Row) -> None:
            told.append(row)
            if len(told) == 4:
                servers[0].kill()
                servers.append(VllmServer(world / "student", port, adapters=False))

        rows = engine.sample(plan(), on_row=on_row)
        assert ids(rows) == wanted and len(told) == len(rows) and {id(row) for row in told} == {id(row) for row in rows}
        check(engine, rows)
        assert engine.take()["engine/weights_loaded"] == 2
    finally:
        for server in servers:
            server.close()
