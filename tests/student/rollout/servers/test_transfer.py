"""Weights from the student's process to a server's by vLLM's own transfer, with gloo in the place of NCCL."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import gloo_transfer
import pytest
import torch
from gloo_transfer import SilentServer
from other_weights import move
from ports import held_port
from server_engines import check, ids, sync
from vllm_rollouts import VllmServer

from opd.config import parse_settings
from opd.engine_versions import TESTED
from opd.errors import ConfigError, RolloutEngineError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import RowKey
from student.rollout.engine import ROLLOUT_ENGINES
from student.rollout.held_update import HeldUpdate
from student.rollout.servers import transfer
from student.rollout.servers import vllm as dialect
from student.rollout.servers.engine import ServersEngine
from student.rollout.servers.folder import WeightsFolder
from student.rollout.servers.held import HeldWeights
from student.rollout.servers.http import Connection, LostError, RefusedError
from student.rollout.servers.weights import written
from student.settings.recipe import Recipe


class ParamMeta(NamedTuple):
    """That of vLLM."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Older(ABC):
    """`WeightSource` of vLLM 0.32, by what its trainer's side uses."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def sent(self) -> tuple[list[ParamMeta], dict[str, torch.Tensor]]:
        """What is read of it in a transfer."""
        return self.metadata(), dict(self)


class Newer(ABC):
    """That of 0.33."""

    def __init_subclass__(cls) -> None:
        assert isinstance(vars(cls).get("metadata"), cached_property)

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [meta.name for meta in self.metadata]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not Newer.iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError

    def sent(self) -> tuple[list[ParamMeta], dict[str, torch.Tensor]]:
        assert self.implements_iter_full() and self.owned_names(0) == [meta.name for meta in self.metadata]
        return self.metadata, dict(self.iter_full())


class Unknown(Newer):
    """A later one, which asks for more."""

    metadata = cached_property(lambda self: [])  # type: ignore[assignment]

    @abstractmethod
    def shards(self) -> None: ...


class Client(Protocol):
    """`VLLMWeightSyncClient` of both."""

    def init_weight_transfer_engine(self, init_info: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class LaterClient(Client, Protocol):
    """One that calls more."""

    def seal_weights(self) -> None: ...


PROMPTS = [Prompt.make(f"{i}+{i * 7}=") for i in range(6)]
Make = Callable[..., ServersEngine]


def on_vllm(test: Any) -> Any:
    missing = find_spec("vllm") is None
    skips = pytest.mark.skipif(missing, reason="vLLM is not installed here; `make engines` runs this")
    return pytest.mark.engine(skips(test))


def plan(samples: int = 2) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=12, temperature=1.0).rows


@pytest.fixture(scope="module")
def receiver(world: Path) -> Iterator[VllmServer]:
    """A vLLM server that receives weights."""
    server = VllmServer(world / "student", held_port(), adapters=False, transfer=True)
    try:
        server.wait()
        yield server
    finally:
        server.close()


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sends over gloo, from the CPU, a layer or so at a time."""
    gloo_transfer.install(monkeypatch.setattr)
    monkeypatch.setattr(transfer, "check_sender", lambda device: None)
    monkeypatch.setattr(transfer, "_BUFFER_BYTES", 20_000)


@pytest.fixture
def sending(make: Make, receiver: VllmServer, gloo: None) -> Callable[..., ServersEngine]:
    """Open an engine that sends its weights to the receiver."""
    return lambda **settings: make(receiver, transfer="nccl", **settings)


@on_vllm
def test_rows_are_sampled_with_the_weights_that_were_sent_and_nothing_is_written(
    sending: Callable[..., ServersEngine],
) -> None:
    engine = sending()
    long = [PlannedRow(RowKey(1, "u", i), Prompt.make("12+34=" * 60), 4, 1.0) for i in range(2)]
    for version in (1, 2):
        move(engine.setup.model)
        sync(engine, version)
        check(engine, engine.sample(long))  # keys and values of the weights before are dropped
        rows = engine.sample(plan())
        check(engine, rows)
        assert {int(v) for row in rows for v in row.policy_version} == {version}
    assert engine.take()["engine/weights_loaded"] == 2
    assert [path.name for path in engine._folder.root.iterdir() if path.suffix != ".lock"] == []


@on_vllm
def test_ranks_that_share_a_server_send_the_same_weights_once_and_a_run_that_goes_on_finds_them(
    sending: Callable[..., ServersEngine],
) -> None:
    engines = [sending(), sending()]
    for engine in engines:
        move(engine.setup.model, 0.7)
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(sync, engines))
    assert sum(engine.take()["engine/weights_loaded"] for engine in engines) == 1
    assert ids(engines[0].sample(plan())) == ids(engines[1].sample(plan()))
    again = sending()
    move(again.setup.model, 0.7)
    sync(again, 5)
    assert again.take()["engine/weights_loaded"] == 0
    check(again, again.sample(plan()))


@on_vllm
@pytest.mark.parametrize("killed", [False, True])
def test_a_transfer_that_breaks_off_in_the_middle_ends_with_an_error_and_the_next_one_is_whole(
    sending: Callable[..., ServersEngine], monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """`killed`: the rank does not put the server in order any more, which it has left paused and half loaded."""
    engine = sending()
    sync(engine)
    move(engine.setup.model)
    whole, call = HeldWeights.__iter__, Connection.call
    sent: list[str] = []

    def breaks_off(weights: HeldWeights) -> Iterator[Any]:
        for name, tensor in whole(weights):
            if threading.current_thread() is not threading.main_thread():  # not while they are hashed
                sent.append(name)
                if len(sent) == 12:
                    raise RuntimeError("the link is down")
            yield name, tensor

    def without_resume(connection: Connection, path: str, body: Any = None) -> Any:
        return None if path == "/resume" else call(connection, path, body)

    with monkeypatch.context() as patch:
        patch.setattr(HeldWeights, "__iter__", breaks_off)
        if killed:
            patch.setattr(Connection, "call", without_resume)
            patch.setattr(dialect, "reset", lambda connection: None)
        with pytest.raises(RolloutEngineError, match=r"no rollout server .* link is down.*incomplete"):
            sync(engine, 2)
    with pytest.raises(RolloutEngineError, match="sync before sampling"):
        engine.sample(plan())
    assert len(sent) == 12
    sync(engine, 2)
    check(engine, engine.sample(plan()))


@on_vllm
def test_a_rank_that_was_killed_when_it_had_only_begun_an_update_keeps_no_other_from_it(
    sending: Callable[..., ServersEngine],
) -> None:
    engine = sending()
    sync(engine)
    connection = engine._pool.servers[0].connect(60.0)
    for path, body in (
        ("/pause?mode=wait", {}),
        ("/update_weight_version", {"new_version": "partial"}),
        ("/start_weight_update", {}),
    ):
        connection.call(path, body)
    connection.close()
    move(engine.setup.model)
    sync(engine, 2)
    check(engine, engine.sample(plan()))


@on_vllm
@pytest.mark.parametrize(
    ("refuses", "error", "said"),
    [(False, LostError, "did not take the weights within 3 s"), (True, RefusedError, "answered 500: no GPU is left")],
)
def test_a_server_that_never_joins_or_refuses_is_not_waited_for_without_limit(
    world: Path, gloo: None, refuses: bool, error: type[Exception], said: str
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "student")
    weights = HeldWeights(model, [], "float32", HeldUpdate(model, "float32"))
    server = SilentServer(refuses)
    try:
        connection = Connection(server.url, None, 3.0)
        with pytest.raises(error, match=said):
            transfer.send(weights, connection)
        connection.close()
    finally:
        server.close()


def test_a_group_that_comes_after_the_transfer_was_given_up_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, ended = threading.Event(), threading.Event()
    sent: list[int] = []

    def late(*told: Any, **more: Any) -> Any:
        assert given_up.wait(60)
        return SimpleNamespace(send_weights=lambda: sent.append(1), shutdown=ended.set)

    made = SimpleNamespace(trainer_init=late)
    vllm = transfer._Vllm(made, lambda *told, **more: None, Newer, ParamMeta, Client)
    monkeypatch.setattr(transfer._Vllm, "installed", lambda: vllm)
    server = SilentServer(refuses=False)
    try:
        connection = Connection(server.url, None, 0.1)
        with pytest.raises(LostError, match="not take the weights"):
            transfer.send(SimpleNamespace(device=torch.device("cpu")), connection)  # type: ignore[arg-type]
        connection.close()
        given_up.set()
        assert ended.wait(60) and not sent
    finally:
        given_up.set()
        server.close()


@on_vllm
def test_a_server_that_was_not_started_to_receive_weights_is_refused(
    make: Make, vllm_server: VllmServer, gloo: None
) -> None:
    with pytest.raises(ConfigError, match=r"start it .* with --weight-transfer-config"):
        make(vllm_server, transfer="nccl")


def test_held_weights_have_the_label_that_a_folder_gives_them_and_are_read_anew(world: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "student")
    given = {name: p.detach() * 0.9 for name, p in model.named_parameters()}
    measure = HeldUpdate(model, "bfloat16")
    held = HeldWeights(model, given.items(), "bfloat16", measure)
    label, _ = WeightsFolder(tmp_path / "w").put(*written(model, given, "bfloat16", measure, adapters=False))
    assert held.label == label != HeldWeights(model, [], "bfloat16", measure).label
    first, second = dict(held), dict(held)
    assert first.keys() == second.keys() and "lm_head.weight" in first
    assert all(torch.equal(first[name], second[name]) and first[name].dtype == torch.bfloat16 for name in first)


@pytest.mark.parametrize("protocol", [Older, Newer])
def test_weights_are_sent_in_the_form_of_the_vllm_that_is_installed(world: Path, protocol: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world / "student")
    held = HeldWeights(model, [], "bfloat16", HeldUpdate(model, "bfloat16"))
    vllm = transfer._Vllm(None, None, protocol, ParamMeta, Client)
    assert not vllm.missing()
    for _ in range(2):  # each server is sent them anew
        metadata, tensors = vllm.sources()(held).sent()
        assert [(m.name, m.dtype, m.shape) for m in metadata] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
        ]


@pytest.mark.parametrize(
    ("source", "client", "said"), [(Unknown, Client, "shards"), (Newer, LaterClient, "seal_weights")]
)
def test_a_vllm_that_asks_for_more_is_refused_before_a_server_is_paused(
    monkeypatch: pytest.MonkeyPatch, source: Any, client: Any, said: str
) -> None:
    vllm = transfer._Vllm(None, None, source, ParamMeta, client)
    monkeypatch.setattr(transfer._Vllm, "installed", lambda: vllm)
    with pytest.raises(ConfigError, match=rf"does not know {said}.*install vLLM {TESTED['vLLM']}"):
        transfer.check_sender(torch.device("cuda"))


def test_a_student_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"GPU to GPU, .* cpu; set \S+transfer: folder"):
        transfer.check_sender(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("sglang_server", {}, r"sglang_server can take weights only from a folder.*sample with vllm_server"),
        ("vllm_server", {"train": {"sharding": "fsdp"}}, r"no rank of a sharded student .* holds all of them"),
        ("vllm_server", {"model": {"path": "m", "lora": {"rank": 4}}}, r"set rollout.engine.merge_adapters: true, or"),
        ("vllm_server", {}, r"needs vllm, which is not installed; .*opd\[vllm\]"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("opd.extras.find_spec", lambda module: None)
    entry = {"name": name, "endpoints": ["http://127.0.0.1:9"], "transfer": "nccl"}
    data = {
        "run": "r",
        "model": {"path": "m"},
        "prompts": {"task": "addition"},
        "objective": [{"name": "sft", "rows": "all"}],
        "rollout": {"engine": entry},
    }
    recipe = parse_settings(Recipe, data | changes)
    cls = ROLLOUT_ENGINES.load(name)
    with pytest.raises(ConfigError, match=said):
        cls(parse_settings(cls.settings_type, entry)).check(recipe, [])
