"""A real model behind the service: the transformers engine, served, equals itself in-process."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.wire.head import HeadStreamDecoder
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb

VOCAB = 256


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random models of one architecture."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    base = tmp_path_factory.mktemp("models")
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
    )
    for number in range(2):
        torch.manual_seed(number)
        Qwen3ForCausalLM(config).save_pretrained(base / str(number))
    return [base / "0", base / "1"]


@pytest.fixture
def engine_of() -> Any:
    from teacher_server.engines.transformers import TransformersEngine

    return lambda model: TransformersEngine(model, device="cpu", deterministic=True)


def items(count: int, k: int = 0) -> list[ScoreItem]:
    rng = np.random.default_rng(1)
    made = []
    for n in range(count):
        rows = 3 + 5 * n
        gather = np.argsort(rng.random((rows, VOCAB)), axis=1)[:, :k].astype(np.uint32) if k else None
        made.append(ScoreItem(rng.integers(0, VOCAB, 4 + rows).astype(np.uint32), 4, gather))
    return made


async def test_served_numbers_are_the_engines_own_bit_for_bit(start: Any, folders: list[Path], engine_of: Any) -> None:
    from teacher_server.engines.base import EngineItem

    client = await start({"t": str(folders[0])}, make=engine_of)
    engine = engine_of(str(folders[0]))
    for spec in (
        PayloadSpec.sampled(),
        PayloadSpec.topk(8, "f32"),
        PayloadSpec.gather(8, "f32"),
        PayloadSpec.hidden("f32"),
        PayloadSpec.full(),
    ):
        asked = items(4, k=8 if spec.kind is PayloadKind.GATHER else 0)
        together = await client.score(asked, spec, temperature=0.7)
        alone = await asyncio.gather(*(client.score([item], spec, temperature=0.7) for item in asked))
        own = engine.score([EngineItem(item, spec, float(np.float32(0.7))) for item in asked])
        for a, b, c in zip(together, alone, own, strict=True):
            for name in ("sampled", "values", "ids", "log_tail", "hidden", "logits"):
                if getattr(c, name) is not None:
                    np.testing.assert_array_equal(getattr(a, name), getattr(c, name))
                    np.testing.assert_array_equal(getattr(b[0], name), getattr(c, name))
    await client.settled()


async def test_hidden_states_and_head_give_the_teachers_logits(start: Any, folders: list[Path], engine_of: Any) -> None:
    client = await start({"t": str(folders[0])}, make=engine_of)
    hidden = await client.score(items(2), PayloadSpec.hidden("f32"))
    full = await client.score(items(2), PayloadSpec.full())
    decoder = HeadStreamDecoder((await client.info()).head.hash)
    async for message in client.stub.GetHead(pb.GetHeadRequest(teacher="t")):
        decoder.feed(message)
    head = decoder.finish()
    assert head.dtype == "f32"
    for states, logits in zip(hidden, full, strict=True):
        np.testing.assert_allclose(states.hidden @ head.weight.T, logits.logits, atol=1e-5)


async def test_weights_are_hot_swapped_and_head_and_hash_follow(
    start: Any, folders: list[Path], engine_of: Any
) -> None:
    client = await start({"t": str(folders[0])}, make=engine_of)
    other = await start({"t": str(folders[1])}, make=engine_of)
    before = await client.info()
    await client.server.shared.teachers.update_weights("t", folders[1])
    after, wanted = await client.info(), await other.info()
    assert after.weights_hash == wanted.weights_hash != before.weights_hash
    assert after.head.hash == wanted.head.hash != before.head.hash
    spec = PayloadSpec.topk(8, "f32")
    swapped, fresh = await client.score(items(2), spec), await other.score(items(2), spec)
    for a, b in zip(swapped, fresh, strict=True):
        np.testing.assert_array_equal(a.values, b.values)


async def test_a_sleeping_model_wakes_for_a_request(start: Any, folders: list[Path], engine_of: Any) -> None:
    client = await start({"t": str(folders[0])}, make=engine_of)
    before = await client.score(items(2), PayloadSpec.sampled())
    await client.server.shared.teachers.sleep("t")
    assert (await client.info()).state == pb.TEACHER_STATE_ASLEEP
    after = await client.score(items(2), PayloadSpec.sampled())
    assert (before[1].sampled == after[1].sampled).all()
    assert (await client.info()).state == pb.TEACHER_STATE_READY


async def test_tokens_whose_numbers_are_nan_fail_their_own_call_only(
    start: Any, folders: list[Path], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from opd.errors import NonFiniteError
    from opd.wire.status import error_from_rpc
    from teacher_server.engines.transformers import TransformersEngine

    poisoned = 77
    shutil.copytree(folders[0], tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.embed_tokens.weight"][poisoned] = float("nan")
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    client = await start({"t": str(tmp_path / "m")}, make=lambda model: TransformersEngine(model, device="cpu"))

    def call(seed: int, *last: int) -> list[ScoreItem]:
        ids = np.random.default_rng(seed).integers(0, poisoned, 20).astype(np.uint32)
        ids[10 : 10 + len(last)] = last
        return [ScoreItem(ids, 4)]

    calls = [call(0), call(1, poisoned), call(2), call(3)]
    spec = PayloadSpec.topk(8, "f32")
    outcomes = await asyncio.gather(*(client.score(items, spec) for items in calls), return_exceptions=True)
    assert type(error_from_rpc(outcomes[1])) is NonFiniteError
    alone = [await client.score(calls[index], spec) for index in (0, 2, 3)]
    for together, single in zip((outcomes[0], outcomes[2], outcomes[3]), alone, strict=True):
        np.testing.assert_allclose(together[0].values, single[0].values, atol=1e-5)
    await client.settled()
