"""A real vLLM server: its cache after new weights, adapters, weights that it cannot load, and its death."""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from other_weights import move
from ports import held_port
from server_engines import check, ids, sync
from vllm_rollouts import VllmServer

from opd.errors import ConfigError, RolloutEngineError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row, RowKey

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
def dying(self, path, body=None, **limits):
    if path == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, path, body, **limits)
Connection.call = dying
settings = ServersSettings(name="vllm_server", endpoints=[url])
Server(url, VllmDialect(), settings, adapters=False).update(Path(folder), label, FileLock(lock))
"""
PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(6)]


def plan(samples: int = 2) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=12, temperature=1.0).rows


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
        assert not (engine._weights.source / "model.safetensors").exists()
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
    kept = f"it holds the earlier weights {old} again"
    with monkeypatch.context() as patch, pytest.raises(RolloutEngineError, match=kept):
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
    words = [vllm_server.url, str(packed.source), packed.label, str(lock), last]
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
