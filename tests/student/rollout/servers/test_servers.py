"""Rollout servers: what a run does when one dies, loads half of its weights, or holds others; by a stand-in."""

import dataclasses
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from other_weights import move, train_adapters
from ports import held_port
from server_engines import ids, sync
from sglang_rollouts import SglangRollouts
from thread_ranks import Meeting

from opd.config import parse_settings
from opd.errors import ConfigError, OpdError, RolloutEngineError
from opd.tasks.environments.lock import Lock, LockOptions
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row
from student.rollout.engine import ROLLOUT_ENGINES
from student.rollout.episodes import EpisodePlayer
from student.rollout.held_update import HeldUpdate
from student.rollout.policy_sampler import sample_or_play
from student.rollout.servers import server as server_module
from student.rollout.servers.engine import ServersEngine
from student.rollout.servers.folder import WeightsFolder
from student.rollout.servers.http import Connection, LostError
from student.rollout.servers.pool import Pool
from student.rollout.servers.settings import ServersSettings
from student.rollout.servers.sglang import SglangDialect
from student.rollout.servers.weights import chosen, shares
from student.settings.episodes import EpisodeSettings

PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(4)]


def plan(samples: int = 2) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=6, temperature=1.0).rows


def test_episodes_are_summarised_on_servers_and_each_window_has_the_log_probs_that_it_was_sampled_with(
    start: Any, open_engine: Any
) -> None:
    engine = open_engine(start())
    sync(engine)
    summary = {"context_tokens": 20, "tokens": 4, "most": 3, "instruction": "sum"}
    settings = {"turns": 5, "turn_tokens": 3, "isolation": "none", "history": "summary", "summary": summary}
    tokenizer, model = engine.setup.tokenizer, engine.setup.model.eval()
    player = EpisodePlayer(parse_settings(EpisodeSettings, settings), tokenizer, engine.setup.spec)
    prompts = [Lock(LockOptions(digits=3, turns=5)).draw(Random(seed)) for seed in range(3)]
    planned = plan_step(1, prompts, samples=1, max_new_tokens=60, temperature=1.0).rows
    rows = sample_or_play(engine, player, planned)
    player.close()
    assert any(row.summaries for row in rows)
    for row in rows:
        for item, first in row.asked(gather=False, own=True):
            ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
            with torch.no_grad():
                logits = model(ids).logits[0, item.prompt_length - 1 : -1, : len(tokenizer)]
            read = logits.log_softmax(-1).gather(-1, ids[0, item.prompt_length :, None])[:, 0].numpy()
            places = item.pick(np.arange(item.response_length))
            np.testing.assert_allclose(row.behaviour_logp[first + places], read[places], atol=1e-4)


def test_a_server_that_dies_in_mid_rollout_costs_no_row_and_doubles_none(start: Any, open_engine: Any) -> None:
    steady, mortal = start(), start()
    expected = open_engine(steady)
    sync(expected)
    wanted = ids(expected.sample(plan()))
    engine = open_engine(steady, mortal)
    sync(engine)
    mortal.dies_after, steady.gate = 1, mortal.went  # it must have had rows before the other has done them all
    told: list[Row] = []
    rows = engine.sample(plan(), on_row=told.append)
    assert ids(rows) == wanted and [row.key for row in rows] == [planned.key for planned in plan()]
    assert len(told) == len(rows) and {id(row) for row in told} == {id(row) for row in rows}
    assert mortal.gone and engine.take()["engine/rows_reissued"] >= 1
    assert ids(engine.sample(plan())) == wanted  # by the one that is left


def test_when_all_servers_are_lost_the_run_waits_for_one_gives_it_the_weights_and_goes_on(
    start: Any, open_engine: Any
) -> None:
    port = held_port()
    first = start(port)
    engine = open_engine(first, patience_seconds=600.0)
    sync(engine)
    wanted = ids(engine.sample(plan()))
    told: list[Row] = []
    later: list[SglangRollouts] = []

    def on_row(row: Row) -> None:
        told.append(row)
        if len(told) == 3:
            first.gone = True
            first.close()
            later.append(start(port))  # started anew: with its first weights

    assert ids(engine.sample(plan(), on_row=on_row)) == wanted
    assert len(told) == len(wanted) and later[0].version == engine._label
    counts = engine.take()
    assert counts["engine/weights_loaded"] == 2 and counts["engine/rows_reissued"] >= 1


def test_a_server_whose_engine_died_costs_no_row(start: Any, open_engine: Any) -> None:
    steady, broken = start(), start()
    engine = open_engine(steady, broken)
    sync(engine)
    wanted = ids(engine.sample(plan()))
    answer, died = broken.answer, threading.Event()

    def fails(path: str, body: Any) -> tuple[int, Any]:
        if path != "/generate":
            return answer(path, body)
        died.set()
        return 500, {"error": "EngineCore encountered an issue."}

    broken.answer, steady.gate = fails, died  # it must have had rows before the other has done them all
    engine.take()
    assert ids(engine.sample(plan())) == wanted
    assert engine.take()["engine/rows_reissued"] >= 1
    assert [server.lost != "" for server in engine._pool.servers] == [False, True]


def test_rows_that_no_server_survives_end_the_run(start: Any, open_engine: Any) -> None:
    server = start()
    engine = open_engine(server, patience_seconds=600.0)
    sync(engine)
    answer = server.answer

    def dies(path: str, body: Any) -> tuple[int, Any]:
        row = path == "/generate" and body["sampling_params"]["temperature"] == 1.0  # not the known one
        return (0, None) if row else answer(path, body)

    server.answer = dies
    with pytest.raises(RolloutEngineError, match=r"lost 5 times .*8 rows"):
        engine.sample(plan())


def test_a_row_that_met_two_versions_is_asked_again(start: Any, open_engine: Any) -> None:
    server = start()
    engine = open_engine(server)
    sync(engine)
    wanted = ids(engine.sample(plan()))
    engine.take()
    server.changes = True
    rows = engine.sample(plan())
    assert ids(rows) == wanted and {1} == {int(v) for row in rows for v in row.policy_version}
    assert not server.changes and server.version == engine._label  # it was given them again
    assert engine.take()["engine/rows_reissued"] >= 1


def test_a_sync_that_fails_half_way_leaves_the_old_weights_and_says_so(start: Any, open_engine: Any) -> None:
    server = start()
    engine = open_engine(server)
    sync(engine)
    old, wanted = engine._label, ids(engine.sample(plan()))
    move(engine.setup.model)
    server.fails = 1
    with pytest.raises(RolloutEngineError, match=f"not take weights .* no space.*{old} again"):
        sync(engine, 2)
    assert server.version == old
    with pytest.raises(RolloutEngineError, match="sync before sampling"):
        engine.sample(plan())
    with torch.no_grad():  # the weights before, bit for bit
        for name, tensor in server.model.state_dict().items():
            if name in (own := engine.setup.model.state_dict()):
                own[name].copy_(tensor)
    sync(engine, 1)
    assert engine._label == old and ids(engine.sample(plan())) == wanted
    move(engine.setup.model)
    server.fails = 2
    with pytest.raises(RolloutEngineError, match="incomplete set of weights"):
        sync(engine, 2)
    assert server.version == "partial"


def test_a_server_that_fails_to_load_is_left_out_and_the_others_go_on(start: Any, open_engine: Any) -> None:
    good, bad = start(), start()
    engine = open_engine(good, bad)
    sync(engine)
    move(engine.setup.model)
    bad.fails = 1
    sync(engine, 2)
    before = bad.rows()
    assert len(engine.sample(plan())) == 8 and bad.rows() == before
    assert engine.take()["engine/servers_lost"] == 1
    sync(engine, 3)
    assert [server.label for server in engine._pool.servers] == [engine._label] * 2  # back


def test_weights_that_did_not_arrive_are_found_out_by_the_known_row(start: Any, open_engine: Any) -> None:
    server = start()
    engine = open_engine(server)
    server.stale = True
    with pytest.raises(RolloutEngineError, match=r"known row differ .* nats"):
        sync(engine)


def test_ranks_that_share_a_server_load_the_same_weights_once(start: Any, open_engine: Any) -> None:
    server = start()
    engines = [open_engine(server), open_engine(server)]
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(sync, engines))
    loads = [body["weight_version"] for path, body in server.asked if path == "/update_weights_from_disk"]
    assert loads == [engines[0]._label] and engines[1]._label == engines[0]._label
    assert ids(engines[0].sample(plan())) == ids(engines[1].sample(plan()))


def test_older_weights_on_disk_go_and_all_of_them_in_the_end(start: Any, open_engine: Any) -> None:
    engine = open_engine(start())
    labels = []
    for version in range(4):
        sync(engine, version)
        labels.append(engine._label)
        move(engine.setup.model)
    assert {path.name for path in engine._folder.root.iterdir() if path.is_dir()} == set(labels[-2:])
    engine.close()
    assert not engine._folder.root.exists()


def test_a_folder_with_other_things_in_it_is_left_with_them(start: Any, open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine(start(), folder=str(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    sync(engine)
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_weights_that_ranks_write_a_file_each_are_those_that_one_writes(open_engine: Any, start: Any) -> None:
    from transformers import AutoModelForCausalLM

    engine = open_engine(start())
    sync(engine)
    model, label, meeting = engine.setup.model, engine._label, Meeting(2)

    def write(index: int) -> tuple[str, Path]:
        folder, ranks = WeightsFolder(engine._folder.root.with_name("together"), "run"), meeting.rank(index)
        files = shares(model, model.named_parameters(), "float32", HeldUpdate(model, "float32"), ranks, limit=20_000)
        return folder.put_together(files, model.config.to_json_string(), ranks)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(write, range(2))
    assert first == second == (label, first[1])  # named by the tensors, not by the files
    assert len(list(first[1].glob("*.safetensors"))) > 2 and [p.name for p in first[1].parent.iterdir() if p.is_dir()]
    loaded = AutoModelForCausalLM.from_pretrained(first[1]).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_a_folder_that_cannot_be_written_is_said_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    meeting = Meeting(2)

    def write(index: int) -> str:
        ranks = meeting.rank(index)
        tensors = {f"t{index}": torch.ones(2)}
        with pytest.raises(OpdError) as failure:
            WeightsFolder(tmp_path / "file" / "below", "run").put_together([("f", tensors)], "{}", ranks)
        return str(failure.value)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(write, range(2))
    assert "cannot be written to" in first and "rollout.engine.folder" in first
    assert second.startswith("rank 0 failed: the weights for the rollout servers cannot be written")


def test_of_a_lora_student_adapters_alone_travel_and_old_ones_go(start: Any, open_engine: Any, world: Path) -> None:
    from transformers import AutoModelForCausalLM

    from student.model.lora import add_lora
    from student.settings.model import LoraSettings

    server = start()
    model = AutoModelForCausalLM.from_pretrained(world / "student")
    add_lora(model, LoraSettings(rank=4), base=str(world / "student"))
    train_adapters(model)
    engine = open_engine(server, model=model)
    sync(engine)
    rows = engine.sample(plan())
    whole = (world / "student" / "model.safetensors").stat().st_size
    assert (engine._weights.source / "adapter_model.safetensors").stat().st_size < whole / 2
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
    sync(engine, 2)
    assert list(server.adapters) == [engine._label] and "/update_weights_from_disk" not in dict(server.asked)
    other = start()
    other._load_lora_adapter = lambda body: (400, {"error": "too many adapters"})
    both = open_engine(server, other, model=model)
    sync(both, 2)  # the one that refuses them is left out
    assert [one.label for one in both._pool.servers] == [engine._label, None]
    merged = open_engine(start(), model=model, merge_adapters=True)
    sync(merged, 2)
    assert ids(merged.sample(plan())) == ids(engine.sample(plan())) != ids(rows)


def test_a_server_that_accepts_connections_and_hangs_does_not_cost_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # the kernel accepts, and no answer comes
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        settings = ServersSettings(name="sglang_server", endpoints=[url], sync_seconds=3600.0)
        one = server_module.Server(url, SglangDialect(), settings, adapters=False)
        with pytest.raises(LostError, match="does not answer"):
            one.update(tmp_path, "w1", FileLock(tmp_path / "lock"))


def test_a_server_that_is_not_there_is_said_at_once(open_engine: Any) -> None:
    class Nobody:
        url = f"http://127.0.0.1:{held_port()}"

    with pytest.raises(RolloutEngineError, match="start it first"):
        open_engine(Nobody())


@pytest.mark.parametrize(("name", "said"), [("vllm_server", {"context_length": 9}), ("sglang_server", None)])
def test_an_address_of_something_else_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, said: Any
) -> None:
    monkeypatch.setattr(Connection, "call", lambda self, path, body=None: said)
    cls: type[ServersEngine] = ROLLOUT_ENGINES.load(name)
    settings = ServersSettings(name=name, endpoints=["http://127.0.0.1:1"])
    unused: Any = None
    with pytest.raises(ConfigError, match=f"server http://127.0.0.1:1 .* engine {name}"):
        Pool(settings, cls.dialect, unused, adapters=False, lock=unused, ask=unused, count=unused)


def test_rows_of_the_head_that_belong_to_no_token_are_never_drawn(start: Any, open_engine: Any) -> None:
    engine = open_engine(start())
    engine.setup = dataclasses.replace(engine.setup, spec=dataclasses.replace(engine.setup.spec, valid_vocab=9))
    sync(engine)
    rows = engine.sample(plan())
    assert max(int(token) for row in rows for token in row.response_ids) < 9
    assert all(row.candidates is not None and row.candidates.max() < 9 for row in rows)


def test_candidates_that_a_server_does_not_give_are_found_by_the_student(
    start: Any, open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = open_engine(start())
    sync(usual)
    wanted = usual.sample(plan())
    # As vLLM says of itself with --max-logprobs 2.
    facts = SglangDialect.facts
    less = lambda *args, **names: dataclasses.replace(facts(*args, **names), most_likely=2)  # noqa: E731
    monkeypatch.setattr(SglangDialect, "facts", less)
    server = start()
    engine = open_engine(server, model=usual.setup.model)
    sync(engine)
    rows = engine.sample(plan())
    assert not any("top_logprobs_num" in body for path, body in server.asked if path == "/generate")
    assert ids(rows) == ids(wanted) and engine.take()["engine/rows_filled"] == len(rows)
    assert all(np.array_equal(row.candidates, other.candidates) for row, other in zip(rows, wanted, strict=True))
    old = {name: p.detach().clone() for name, p in engine.setup.model.named_parameters()}
    move(engine.setup.model)  # it learns, while rows are sampled with the weights of before
    engine.sync(old.items(), 1)
    again = engine.sample(plan())
    assert all(np.array_equal(row.candidates, other.candidates) for row, other in zip(again, wanted, strict=True))


def test_candidates_keep_what_must_be_among_them() -> None:
    assert chosen([7, 3, 5], 3, ()).tolist() == [7, 3, 5]
    assert chosen([7, 3, 5], 3, (5,)).tolist() == [7, 3, 5]
    assert chosen([7, 3, 5], 3, (9,)).tolist() == [7, 3, 9]
    assert chosen([7, 5, 3], 3, (5, 9)).tolist() == [7, 5, 9]


def test_settings_that_cannot_work_are_refused() -> None:
    cls = ROLLOUT_ENGINES.load("vllm_server").settings_type
    for endpoints, said in (
        (["host:1"], "must start with http"),
        (["http://a", "http://a"], "named twice"),
        ([], "at least 1 item"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse_settings(cls, {"name": "vllm_server", "endpoints": endpoints})
    settings = parse_settings(cls, {"name": "x", "endpoints": ["http://a"], "api_key_env": "NOT_SET_ANYWHERE"})
    with pytest.raises(ConfigError, match=r"NOT_SET_ANYWHERE, .*not set"):
        settings.api_key()
