"""What holds of an SGLang server: of a real one where SGLang is installed (`make sglang`), else of its stand-in."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from other_weights import move
from ports import held_port
from server_engines import check, sync
from sglang_rollouts import SglangRollouts
from sglang_server import SglangServer
from waiting import wait_until

from opd.errors import ConfigError, RolloutEngineError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row
from student.rollout.servers.dialect import Ask
from student.rollout.servers.engine import ServersEngine

on_sglang = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed here; `make sglang` runs this"),
]
PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(6)]
END = 1  # of the test world's models


def plan(samples: int = 2) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=12, temperature=1.0).rows


@pytest.fixture
def engine(make: Callable[..., ServersEngine], sglang_server: Any) -> ServersEngine:
    """An engine on the server, which holds the student's weights."""
    made = make(sglang_server, name="sglang_server")
    sync(made)
    return made


@pytest.fixture
def sampled(engine: ServersEngine) -> Iterator[Callable[..., Any]]:
    """sampled(prompt, limit, stops, barred): the server's answer to a row."""
    server = engine._pool.servers[0]
    with server.connect() as connection:

        def ask(prompt: list[int], limit: int, stops: list[int], barred: range = range(260, 260)) -> Any:
            return server.generate(connection, Ask(prompt, limit, 1.0, stops, 7, 0, barred, engine._label))

        yield ask


def test_a_row_ends_at_its_own_stops_alone_and_goes_on_past_the_end_token_of_the_model(
    engine: ServersEngine, sampled: Callable[..., Any]
) -> None:
    """Two tokens are left to draw, of which one is the model's end."""
    with torch.no_grad():
        logits = engine.setup.model(torch.tensor([[5, 6]])).logits[0, -1, :2].log_softmax(-1)
    free = sampled([5, 6], 40, [], range(2, 260))
    assert len(free.ids) == 40 and END in free.ids[:-1] and set(free.ids) <= {0, END}
    assert free.logp[0] == pytest.approx(float(logits[free.ids[0]]), abs=1e-3)
    stopped = sampled([5, 6], 40, [0], range(2, 260))
    assert stopped.ids[-1] == 0 and set(stopped.ids[:-1]) <= {END}
    assert len(free.logp) == 40 and free.weights == stopped.weights == (engine._label,)


def test_a_row_may_be_as_long_as_the_engine_says(engine: ServersEngine, sampled: Callable[..., Any]) -> None:
    longest = engine._pool.longest
    for limit in (1, 6):
        assert len(sampled([5] * (longest - limit), limit, []).ids) == limit


def test_weights_are_replaced_after_rows_in_flight_which_stay_those_of_the_weights_before(
    engine: ServersEngine, sampled: Callable[..., Any], sglang_server: Any
) -> None:
    before = engine._label
    move(engine.setup.model)
    packed = engine.pack(list(engine.setup.model.named_parameters()), 2)
    with ThreadPoolExecutor(1) as other_rank:
        row = other_rank.submit(sampled, [5, 6], 300, [END])
        if isinstance(sglang_server, SglangRollouts):
            asked = sglang_server.rows()
            wait_until(lambda: sglang_server.rows() > asked or row.done(), 60)
        packed.load()
        packed.drop()
        assert row.result().weights in ((before,), (engine._label,))  # it may have come after the load
    check(engine, engine.sample(plan()))


def test_a_folder_that_a_server_does_not_see_leaves_it_with_the_old_weights(
    engine: ServersEngine, make: Callable[..., ServersEngine], sglang_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, put = engine._label, type(engine._folder).put
    move(engine.setup.model)

    def elsewhere(*args: Any) -> tuple[str, Path]:
        label, path = put(*args)
        return label, path.with_name("elsewhere")

    said = rf"did not take weights .*elsewhere.*it holds the earlier weights {old} again"
    with monkeypatch.context() as patch, pytest.raises(RolloutEngineError, match=said):
        patch.setattr(type(engine._folder), "put", elsewhere)
        sync(engine, 2)
    again = make(sglang_server, name="sglang_server")
    sync(again)
    assert not again.take().get("engine/weights_loaded")
    check(again, again.sample(plan()))


def test_rows_whose_client_hung_up_do_not_keep_a_server_from_the_next_weights(
    engine: ServersEngine, sglang_server: Any
) -> None:
    server = engine._pool.servers[0]
    ask = Ask([5, 6], 400, 1.0, [], 7, 0, range(260, 260), engine._label)
    with server.connect() as connection, ThreadPoolExecutor(1) as pool:
        row = pool.submit(server.generate, connection, ask)
        connection.cut()
        row.exception()
    if isinstance(sglang_server, SglangRollouts):
        sglang_server.unflushed = True
    move(engine.setup.model)
    sync(engine, 2)
    check(engine, engine.sample(plan()))


def test_a_server_with_a_key_of_its_own_for_new_weights_is_given_that_one(
    start: Callable[..., SglangRollouts], make: Callable[..., ServersEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    server.keys = ("usual", "admins")
    monkeypatch.setenv("USUAL", "usual")
    monkeypatch.setenv("ADMINS", "admins")
    with_one = make(server, name="sglang_server", api_key_env="USUAL", patience_seconds=0.0)
    with pytest.raises(RolloutEngineError, match="401"):
        sync(with_one)
    engine = make(server, name="sglang_server", api_key_env="USUAL", admin_api_key_env="ADMINS")
    sync(engine)
    check(engine, engine.sample(plan()))
    settings = engine.settings.model_copy(update={"admin_api_key_env": "NOT_SET_ANYWHERE"})
    with pytest.raises(ConfigError, match=r"rollout\.engine\.admin_api_key_env .* NOT_SET_ANYWHERE"):
        settings.api_key(admin=True)


def test_a_load_that_failed_leaves_no_label_that_a_run_could_take_for_weights(
    start: Callable[..., SglangRollouts], make: Callable[..., ServersEngine]
) -> None:
    """The server holds the new weights under the label of the old ones."""
    server = start()
    engine = make(server, name="sglang_server")
    sync(engine)
    old = {name: p.detach().clone() for name, p in engine.setup.model.named_parameters()}
    engine._pool.servers[0]._good = None  # nothing to go back to
    move(engine.setup.model)
    server.fails = 1
    with pytest.raises(RolloutEngineError, match="incomplete set of weights"):
        sync(engine, 2)
    with torch.no_grad():
        for name, parameter in engine.setup.model.named_parameters():
            parameter.copy_(old[name])
    engine.take()
    sync(engine, 1)
    assert engine.take()["engine/weights_loaded"] == 1
    check(engine, engine.sample(plan()))


class TestWithSglang:
    pytestmark = on_sglang

    def test_a_server_that_is_killed_and_started_again_gets_the_weights_and_costs_no_row(
        self, make: Callable[..., ServersEngine], world: Path
    ) -> None:
        port = held_port()
        servers = [SglangServer(world / "student", port)]
        try:
            servers[0].wait()
            with pytest.raises(ConfigError, match="--lora-target-modules all"):
                make(servers[0], name="sglang_server", rank=4)
            engine = make(servers[0], name="sglang_server", in_flight=1, patience_seconds=900.0)
            move(engine.setup.model)
            sync(engine)
            told: list[Row] = []

            def on_row(row: Row) -> None:
                told.append(row)
                if len(told) == 4:
                    servers[0].kill()
                    servers.append(SglangServer(world / "student", port))

            rows = engine.sample(plan(), on_row=on_row)
            assert len(rows) == len(plan()) and {id(row) for row in told} == {id(row) for row in rows}
            check(engine, rows)
            assert engine.take()["engine/weights_loaded"] == 2
        finally:
            for server in servers:
                server.close()
