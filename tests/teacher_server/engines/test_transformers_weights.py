"""Weights of a running transformers engine: exchanged, put to sleep, woken, counted once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import engine_numbers as numbers
import pytest
import torch
from safetensors.torch import load_file, save_file

from opd.errors import ConfigError, IncompatibleTeacherError, NonFiniteError, UnavailableError
from opd.wire.fingerprint import head_hash, weights_hash
from opd.wire.types import PayloadSpec
from teacher_server.engines.transformers import TransformersEngine


def test_new_weights_give_the_new_models_numbers_and_hash(make_model, make_item, entry, reference_logits) -> None:
    old, new = make_model("llama"), make_model("llama", seed=1)
    engine = TransformersEngine(str(old))
    before, item = engine.info, make_item(5, 9)
    numbers.close(engine.score([entry(item, PayloadSpec.sampled())])[0], reference_logits(old, item), item)
    engine.prepare_weights(new)()
    (scores,) = engine.score([entry(item, PayloadSpec.sampled())])
    numbers.close(scores, reference_logits(new, item), item)
    assert scores.weights_hash == engine.info.weights_hash == weights_hash(new) != before.weights_hash
    assert engine.info.head.hash == head_hash(engine.head()) != before.head.hash


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # heads tied to the embeddings, and not
def test_a_second_exchange_brings_the_old_weights_back_without_their_folder(
    family: str, make_model, make_item, entry, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(make_model(family), old)
    shutil.copytree(make_model(family, seed=1), new)
    engine = TransformersEngine(str(old))
    before, item = engine.info, entry(make_item(5, 9), PayloadSpec.full())
    bits = numbers.bits(engine.score([item])[0])
    exchange = engine.prepare_weights(new)
    shutil.rmtree(old)
    shutil.rmtree(new)
    exchange()
    other = engine.info
    fresh = numbers.bits(engine.score([item])[0])
    exchange()
    assert (engine.info, numbers.bits(engine.score([item])[0])) == (before, bits) != (other, fresh)
    exchange()
    assert (engine.info, numbers.bits(engine.score([item])[0])) == (other, fresh)


def test_a_head_that_is_being_sent_does_not_change_with_the_weights(make_model) -> None:
    engine = TransformersEngine(str(make_model("qwen3")))
    head = engine.head()
    engine.prepare_weights(make_model("qwen3", seed=1))()
    assert head_hash(head) == head.hash != engine.head().hash


def test_an_exchange_does_nothing_after_the_swap_that_could_fail(
    make_model, make_item, entry, reference_logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, new, item = TransformersEngine(str(make_model("qwen3"))), make_model("qwen3", seed=1), make_item(6, 9)
    exchange = engine.prepare_weights(new)

    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as short:
        short.setattr("teacher_server.engines.transformers.export", no_memory)
        exchange()
    assert engine.info.weights_hash == weights_hash(new)
    assert engine.info.head is not None and engine.info.head.hash == engine.head().hash == head_hash(engine.head())
    numbers.close(engine.score([entry(item, PayloadSpec.sampled())])[0], reference_logits(new, item), item)


def test_the_memory_of_tied_weights_counts_once(make_model) -> None:
    for family in ("llama", "qwen3"):
        folder = make_model(family)
        stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
        # Buffers such as rotary frequencies are not in the file.
        assert stored <= TransformersEngine(str(folder)).memory_bytes() < 1.05 * stored


@pytest.mark.parametrize("damage", ["missing", "truncated", "other_shape", "other_config", "nan", "absent"])
def test_weights_that_do_not_fit_change_nothing(
    damage: str, make_model: Callable[..., Path], make_item, entry, tmp_path: Path
) -> None:
    old = make_model("llama")
    engine = TransformersEngine(str(old))
    before = numbers.bits(engine.score([entry(make_item(5, 9), PayloadSpec.full())])[0])
    folder = tmp_path / "new"
    shutil.copytree(make_model("llama", seed=1), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del tensors[name]
        save_file(tensors, file, {"format": "pt"})
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "other_shape":
        shutil.rmtree(folder)
        shutil.copytree(make_model("llama", seed=1, intermediate_size=96), folder)
    elif damage == "other_config":  # the same tensors would compute something else
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    elif damage == "nan":
        tensors[name][3, 3] = torch.nan
        save_file(tensors, file, {"format": "pt"})
    else:
        file.unlink()
    with pytest.raises((ConfigError, IncompatibleTeacherError, NonFiniteError)):
        engine.prepare_weights(folder)()
    assert engine.info.weights_hash == weights_hash(old)
    assert numbers.bits(engine.score([entry(make_item(5, 9), PayloadSpec.full())])[0]) == before


def test_a_sleeping_or_closed_engine_refuses_and_a_woken_one_scores_as_before(make_model, make_item, entry) -> None:
    engine = TransformersEngine(str(make_model("llama")))
    batch = [entry(make_item(5, 9), PayloadSpec.topk(3))]
    before = numbers.bits(engine.score(batch)[0])
    engine.sleep()
    with pytest.raises(UnavailableError, match="asleep"):
        engine.score(batch)
    engine.wake()
    assert numbers.bits(engine.score(batch)[0]) == before
    engine.close()
    with pytest.raises(UnavailableError, match="closed"):
        engine.score(batch)
