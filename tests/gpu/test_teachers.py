"""A teacher on a GPU gives what it gives on the CPU, also after it slept and after its weights were exchanged."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine

pytestmark = pytest.mark.gpu
ITEMS = [ScoreItem(np.random.default_rng(seed).integers(4, 200, 30, dtype=np.uint32), 6 + seed) for seed in range(8)]
SPECS = [PayloadSpec.sampled(), PayloadSpec.topk(8, "f32"), PayloadSpec.hidden("f32")]


def numbers(engine: TransformersEngine, spec: PayloadSpec) -> list[NDArray[np.float32]]:
    found = engine.score([EngineItem(item, spec) for item in ITEMS])
    return [one.hidden if one.hidden is not None else one.sampled for one in found if one is not None]  # type: ignore[misc]


def assert_close(one: list[NDArray[np.float32]], other: list[NDArray[np.float32]]) -> None:
    assert len(one) == len(other) == len(ITEMS)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=5e-3)


@pytest.fixture(scope="module")
def engines(device: str, world: Path) -> Iterator[tuple[TransformersEngine, TransformersEngine]]:
    """One on the device, and one on the CPU, both in float32."""
    made = tuple(TransformersEngine(str(world / "teacher"), device=name, dtype="f32") for name in (device, "cpu"))
    yield made[0], made[1]
    for one in made:
        one.close()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.name.lower())
def test_scores_are_those_of_the_cpu(engines: tuple[TransformersEngine, TransformersEngine], spec: PayloadSpec) -> None:
    assert_close(*(numbers(engine, spec) for engine in engines))


def test_scores_are_the_same_after_sleep_and_those_of_new_weights_after_an_exchange(
    engines: tuple[TransformersEngine, TransformersEngine], world: Path, tmp_path: Path
) -> None:
    engine, _ = engines
    before = numbers(engine, SPECS[0])
    engine.sleep()
    engine.wake()
    assert_close(numbers(engine, SPECS[0]), before)
    model = AutoModelForCausalLM.from_pretrained(world / "teacher")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    shutil.copytree(world / "teacher", tmp_path / "weights")
    model.save_pretrained(tmp_path / "weights")
    other = TransformersEngine(str(tmp_path / "weights"), device="cpu", dtype="f32")
    expected = numbers(other, SPECS[0])
    other.close()
    exchange = engine.prepare_weights(tmp_path / "weights")
    exchange()
    assert_close(numbers(engine, SPECS[0]), expected)
    exchange()
    assert_close(numbers(engine, SPECS[0]), before)
