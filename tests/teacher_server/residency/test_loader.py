"""Models that cannot be loaded, or not in time, through a real server: they hold up nothing else."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file
from waiting import until

from opd.errors import DeadlineError, InvalidRequestError, OpdError, UnavailableError
from opd.wire.status import error_from_rpc
from opd.wire.types import PayloadSpec
from opd.wire.v1 import admin_pb2 as admin
from teacher_server.residency.loader import Loader

SAMPLED = PayloadSpec.sampled()


async def refusal(call: Any) -> OpdError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return error_from_rpc(caught.value)


@pytest.mark.parametrize("model", ["/tmp/" + "x" * 300, "~nosuchuser/model"])
async def test_a_path_that_cannot_exist_is_an_invalid_argument(
    model: str, operator: Any, tmp_path: Path, items: Any
) -> None:
    client, stub, metadata = await operator(tmp_path)
    error = await refusal(stub.LoadTeacher(admin.LoadTeacherRequest(teacher="u", model=model), metadata=metadata))
    assert type(error) is InvalidRequestError
    assert "cannot be read" in str(error)
    request = admin.UpdateWeightsRequest(teacher="t", folder=model)
    assert type(await refusal(stub.UpdateWeights(request, metadata=metadata))) is InvalidRequestError
    assert client.server.shared.metrics.unexpected_errors._value.get() == 0
    assert len(await client.score(items(1), SAMPLED)) == 1


async def test_a_config_of_a_billion_layers_is_refused_before_anything_is_built(operator: Any, tmp_path: Path) -> None:
    """With the engine that would build it: without the check this call ends when memory or patience does."""
    from teacher_server.engines.transformers import TransformersEngine

    folder = tmp_path / "huge"
    folder.mkdir()
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 10**9,
        "vocab_size": 50,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": np.zeros((50, 8), np.float32)}, folder / "model.safetensors")
    client, stub, metadata = await operator(
        tmp_path, teachers={}, make=lambda model: TransformersEngine(model, device="cpu")
    )
    request = admin.LoadTeacherRequest(teacher="u", model=str(folder))
    error = await refusal(stub.LoadTeacher(request, metadata=metadata, timeout=120))
    assert type(error) is InvalidRequestError
    assert "num_hidden_layers 1000000000" in str(error)
    assert not client.server.shared.teachers.loading


async def test_a_model_that_takes_too_long_is_given_up_and_holds_up_no_other(
    operator: Any, tmp_path: Path, items: Any, numpy_engine: Any
) -> None:
    gate, made = threading.Event(), []

    def make(model: str) -> Any:
        if model == "endless":
            gate.wait(120)
        made.append(numpy_engine(model))
        return made[-1]

    client, stub, metadata = await operator(tmp_path, make=make, engine={"load_seconds": 0.3})

    def load(name: str, model: str) -> Any:
        return stub.LoadTeacher(admin.LoadTeacherRequest(teacher=name, model=model), metadata=metadata)

    error = await refusal(load("u", "endless"))
    assert type(error) is DeadlineError
    assert "model endless did not load within 0.3 s" in str(error)
    assert len(await client.score(items(1), SAMPLED)) == 1
    error = await refusal(load("v", "other"))
    assert type(error) is UnavailableError
    assert "model endless is still loading" in str(error)
    gate.set()
    await until(lambda: not client.server.shared.teachers.loading)
    assert [engine.model for engine in made] == ["numpy", "endless"]
    assert made[1].closed
    client.server.shared.teachers._loader._seconds = 60.0
    await load("v", "other")
    assert len(await client.score(items(1), SAMPLED, teacher="v")) == 1


async def test_a_second_model_waits_for_the_first_no_longer_than_the_limit() -> None:
    loader, inside, gate = Loader(60.0), threading.Event(), threading.Event()

    async def read(loader: Loader, work: Callable[[], object]) -> None:
        async with loader.turn() as turn:
            await turn.read("x", work)

    first = asyncio.create_task(read(loader, lambda: (inside.set(), gate.wait(120))))
    await asyncio.to_thread(inside.wait, 120)
    second = asyncio.create_task(read(loader, int))  # waits for its turn, and gets it
    await asyncio.sleep(0)
    assert not second.done()
    gate.set()
    await asyncio.gather(first, second)
    hasty = Loader(0.05)
    held = hasty.turn()
    await held.__aenter__()
    with pytest.raises(UnavailableError, match="another model"):
        await read(hasty, int)
    await held.__aexit__(None, None, None)


async def test_a_caller_that_leaves_does_not_free_the_turn_before_the_thread_ends() -> None:
    loader, inside, gate = Loader(30.0), threading.Event(), threading.Event()
    discarded: list[str] = []

    def work() -> str:
        inside.set()
        gate.wait(120)
        return "late"

    async def read() -> None:
        async with loader.turn() as turn:
            await turn.read("x", work, discarded.append)

    call = asyncio.create_task(read())
    await asyncio.to_thread(inside.wait, 120)
    for _ in range(2):  # even when it is cancelled twice
        call.cancel()
        await asyncio.wait({call}, timeout=0)
    await asyncio.wait({call})
    assert loader.busy
    gate.set()
    await until(lambda: not loader.busy)
    assert discarded == ["late"]


async def test_a_model_that_fails_after_it_was_given_up_frees_the_turn_without_a_word() -> None:
    loader, gate, complaints = Loader(0.05), threading.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def fail() -> None:
        gate.wait(120)
        raise RuntimeError("no such file")

    with pytest.raises(DeadlineError):
        async with loader.turn() as turn:
            await turn.read("x", fail)
    gate.set()
    await until(lambda: not loader.busy)
    assert not complaints
