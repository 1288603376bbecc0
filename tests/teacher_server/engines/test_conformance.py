"""The same cases for every engine: same model, same ids, bounded difference to the model's own unbatched forward.

An engine that does not announce a payload is not asked for it; that it refuses is a case of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from opd.errors import InvalidRequestError
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores
from teacher_server.engines.base import Engine, EngineItem

BOUND = 2e-4  # nats, f32 on both sides


@pytest.fixture
def expect(
    model_folder: Path, reference_logits: Callable[[Path, ScoreItem], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """expect(item, temperature=1.0) -> reference log-probs [T, V]."""

    def expected(item: ScoreItem, temperature: float = 1.0) -> torch.Tensor:
        return torch.log_softmax(reference_logits(model_folder, item).double() / temperature, -1)

    return expected


def _need(engine: Engine, kind: PayloadKind) -> None:
    if kind not in engine.info.payloads:
        pytest.skip(f"{engine.info.engine} does not announce payload {kind}")


def _score(engine: Engine, *entries: EngineItem) -> list[Scores]:
    found = engine.score(entries)
    assert len(found) == len(entries)
    assert all(scores is not None for scores in found)
    return [scores for scores in found if scores is not None]


def _sampled(logp: torch.Tensor, item: ScoreItem) -> np.ndarray:
    targets = torch.from_numpy(item.response_ids.astype(np.int64))
    return logp.gather(-1, targets[:, None]).squeeze(-1).numpy()


def _tail(logp: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    outside = logp.clone().scatter_(-1, torch.from_numpy(ids.astype(np.int64)), -torch.inf)
    return torch.logsumexp(outside, -1).numpy()


def test_sampled_log_probs_are_those_of_the_model(engine: Engine, make_item, entry, expect) -> None:
    items = [make_item(5, 7, seed=1), make_item(1, 3, seed=2), make_item(20, 1, seed=3)]
    for item, scores in zip(items, _score(engine, *(entry(i, PayloadSpec.sampled()) for i in items)), strict=True):
        assert scores.sampled is not None and scores.sampled.dtype == np.float32
        np.testing.assert_allclose(scores.sampled, _sampled(expect(item), item), atol=BOUND)


def test_row_t_predicts_response_token_t_and_no_neighbour(engine: Engine, make_item, entry, expect) -> None:
    item = make_item(6, 12, seed=4)
    (scores,) = _score(engine, entry(item, PayloadSpec.sampled()))
    expected = _sampled(expect(item), item)
    assert np.abs(scores.sampled - expected).max() < BOUND
    assert np.abs(scores.sampled[1:] - expected[:-1]).max() > 0.1
    assert np.abs(scores.sampled[:-1] - expected[1:]).max() > 0.1


@pytest.mark.parametrize("dtype", ["f32", "f16", "u16"])
def test_top_k_is_the_models_with_log_tail_and_sampled(engine: Engine, make_item, entry, expect, dtype: str) -> None:
    item = make_item(4, 9, seed=5)
    (scores,) = _score(engine, entry(item, PayloadSpec.topk(8, dtype)))
    logp = expect(item)
    values, ids = logp.topk(8, -1)
    assert scores.ids is not None and scores.ids.dtype == np.uint32
    assert scores.values is not None and scores.values.dtype == (np.float16 if dtype == "f16" else np.float32)
    np.testing.assert_array_equal(scores.ids, ids.numpy())
    np.testing.assert_allclose(scores.values, values.numpy(), atol=8e-3 if dtype == "f16" else BOUND)
    np.testing.assert_allclose(scores.log_tail, _tail(logp, scores.ids), atol=BOUND)
    np.testing.assert_allclose(scores.sampled, _sampled(logp, item), atol=BOUND)


@pytest.mark.parametrize("kind", list(PayloadKind))
def test_spans_give_the_numbers_of_their_positions(engine: Engine, make_item, entry, kind: PayloadKind) -> None:
    _need(engine, kind)
    assert engine.info.spans
    k = 6 if kind in (PayloadKind.TOPK, PayloadKind.GATHER) else 0
    spec = PayloadSpec(kind, k, "f32")
    whole = make_item(5, 12, seed=9, k=k if kind is PayloadKind.GATHER else 0)
    other = make_item(5, 7, seed=10, k=k if kind is PayloadKind.GATHER else 0)
    part = replace(whole, spans=((0, 2), (5, 9)))
    if whole.gather_ids is not None:
        part = replace(part, gather_ids=part.pick(whole.gather_ids))
    everything, _ = _score(engine, entry(whole, spec), entry(other, spec))
    found, neighbour = _score(engine, entry(part, spec), entry(other, spec))
    for name in ("sampled", "values", "ids", "log_tail", "hidden", "logits"):
        array, there = getattr(everything, name), getattr(found, name)
        assert (array is None) == (there is None)
        if array is not None and there is not None:
            assert len(there) == 6 and len(getattr(neighbour, name)) == 7
            np.testing.assert_allclose(there, part.pick(array), atol=BOUND)


def test_k_equal_to_the_vocabulary_leaves_a_tail_of_minus_infinity(engine: Engine, make_item, entry, expect) -> None:
    rows = engine.info.vocab_size
    if engine.info.max_k < rows:
        pytest.skip(f"max_k is {engine.info.max_k}")
    item = make_item(4, 3, seed=6)
    (scores,) = _score(engine, entry(item, PayloadSpec.topk(rows, "f32")))
    assert np.isneginf(scores.log_tail).all()
    np.testing.assert_array_equal(np.sort(scores.ids, -1), np.tile(np.arange(rows), (3, 1)))
    np.testing.assert_allclose(np.exp(scores.values.astype(np.float64)).sum(-1), 1.0, atol=1e-4)


def test_k_of_one_is_the_most_likely_token(engine: Engine, make_item, entry, expect) -> None:
    item = make_item(4, 5, seed=7)
    (scores,) = _score(engine, entry(item, PayloadSpec.topk(1, "f32")))
    np.testing.assert_array_equal(scores.ids[:, 0], expect(item).argmax(-1).numpy())


def test_gather_takes_other_ids_at_each_position_in_the_callers_order(engine: Engine, make_item, entry, expect) -> None:
    _need(engine, PayloadKind.GATHER)
    item = make_item(5, 8, seed=8, k=6)
    (scores,) = _score(engine, entry(item, PayloadSpec.gather(6, "f32")))
    logp = expect(item)
    wanted = logp.gather(-1, torch.from_numpy(item.gather_ids.astype(np.int64))).numpy()
    np.testing.assert_array_equal(scores.ids, item.gather_ids)
    np.testing.assert_allclose(scores.values, wanted, atol=BOUND)
    np.testing.assert_allclose(scores.log_tail, _tail(logp, item.gather_ids), atol=BOUND)
    np.testing.assert_allclose(scores.sampled, _sampled(logp, item), atol=BOUND)


def _logits(head: Head, hidden: np.ndarray) -> np.ndarray:
    """The formula of `opd.wire.types.Head`, in f64."""
    weight = torch.from_numpy(head.weight)
    weight = weight.view(torch.bfloat16) if head.dtype == "bf16" else weight
    states = torch.from_numpy(hidden)
    states = states.view(torch.bfloat16) if hidden.dtype == np.uint16 else states
    out = states.double() @ weight.double().T
    if head.bias is not None:
        out = out + torch.from_numpy(head.bias).double()
    out = out * head.logit_scale
    return (head.soft_cap * torch.tanh(out / head.soft_cap) if head.soft_cap else out).numpy()


@pytest.mark.parametrize(("dtype", "bound"), [("f32", BOUND), ("bf16", 0.2)])
def test_hidden_states_times_head_are_the_models_logits(
    engine: Engine, make_item, entry, reference_logits, model_folder: Path, dtype: str, bound: float
) -> None:
    _need(engine, PayloadKind.HIDDEN)
    item = make_item(5, 6, seed=9)
    (scores,) = _score(engine, entry(item, PayloadSpec.hidden(dtype)))
    head = engine.head()
    assert engine.info.head is not None and head.hash == engine.info.head.hash != ""
    assert scores.hidden is not None and scores.hidden.shape == (6, engine.info.head.hidden_size)
    assert scores.hidden.dtype == (np.uint16 if dtype == "bf16" else np.float32)
    np.testing.assert_allclose(_logits(head, scores.hidden), reference_logits(model_folder, item), atol=bound)


def test_full_logits_are_the_models(engine: Engine, make_item, entry, reference_logits, model_folder: Path) -> None:
    _need(engine, PayloadKind.FULL)
    item = make_item(5, 4, seed=10)
    at_one, at_two = _score(engine, entry(item, PayloadSpec.full()), entry(item, PayloadSpec.full(), 2.0))
    expected = reference_logits(model_folder, item).numpy()
    np.testing.assert_allclose(at_one.logits, expected, atol=BOUND)
    np.testing.assert_allclose(at_two.logits, expected / 2, atol=BOUND)


def test_temperature_divides_the_logits_or_is_refused(engine: Engine, make_item, entry, expect) -> None:
    item = make_item(5, 6, seed=11)
    asked = [entry(item, PayloadSpec.topk(4, "f32"), temperature) for temperature in (0.7, 1.0, 2.5)]
    if not engine.info.supports_temperature:
        for one in (asked[0], asked[2]):
            with pytest.raises(InvalidRequestError, match="temperature"):
                engine.score([one])
        return
    for one, scores in zip(asked, _score(engine, *asked), strict=True):
        logp = expect(item, one.temperature)
        np.testing.assert_allclose(scores.values, logp.topk(4, -1).values.numpy(), atol=BOUND)
        np.testing.assert_allclose(scores.log_tail, _tail(logp, scores.ids), atol=BOUND)
        np.testing.assert_allclose(scores.sampled, _sampled(logp, item), atol=BOUND)


def test_an_input_longer_than_a_chunk_is_scored_whole(engine: Engine, make_item, entry, expect) -> None:
    item = make_item(150, 180, seed=12)  # the engines of this suite compute at most 64 tokens at a time
    (scores,) = _score(engine, entry(item, PayloadSpec.topk(5, "f32")))
    logp = expect(item)
    np.testing.assert_allclose(scores.sampled, _sampled(logp, item), atol=BOUND)
    np.testing.assert_allclose(scores.values, logp.topk(5, -1).values.numpy(), atol=BOUND)


def test_a_repeated_prompt_gives_the_same_numbers_as_a_fresh_one(engine: Engine, make_item, entry, expect) -> None:
    items = [make_item(40, length, seed=seed, prompt_seed=99) for seed, length in enumerate((9, 1, 17, 4))]
    for _ in range(2):  # the second time every prompt could come from a cache
        found = _score(engine, *(entry(item, PayloadSpec.topk(3, "f32")) for item in items))
        for item, scores in zip(items, found, strict=True):
            np.testing.assert_allclose(scores.sampled, _sampled(expect(item), item), atol=BOUND)
    (again,) = _score(engine, entry(items[2], PayloadSpec.sampled()))
    np.testing.assert_allclose(again.sampled, _sampled(expect(items[2]), items[2]), atol=BOUND)


def test_a_mixed_batch_keeps_order_payloads_and_temperatures_apart(engine: Engine, make_item, entry, expect) -> None:
    specs = [PayloadSpec.sampled(), PayloadSpec.topk(2), PayloadSpec.topk(7, "f32"), PayloadSpec.sampled()]
    asked = [entry(make_item(3 + i, 2 + 3 * i, seed=20 + i), spec) for i, spec in enumerate(specs * 2)]
    for one, scores in zip(asked, _score(engine, *asked), strict=True):
        np.testing.assert_allclose(scores.sampled, _sampled(expect(one.item), one.item), atol=BOUND)
        assert (scores.values is None) == (one.spec.kind is PayloadKind.SAMPLED)
        assert scores.values is None or scores.values.shape == (one.item.response_length, one.spec.k)
        assert scores.weights_hash == engine.info.weights_hash


def test_a_cancelled_item_is_none_and_its_neighbours_are_scored(engine: Engine, make_item, entry, expect) -> None:
    items = [make_item(5, 6, seed=30 + i) for i in range(3)]
    batch = [entry(item, PayloadSpec.sampled()) for item in items]
    batch[1] = entry(items[1], PayloadSpec.sampled(), cancelled=lambda: True)
    found = engine.score(batch)
    assert found[1] is None
    for i in (0, 2):
        np.testing.assert_allclose(found[i].sampled, _sampled(expect(items[i]), items[i]), atol=BOUND)


def test_a_batch_of_cancelled_items_and_an_empty_batch_cost_nothing(engine: Engine, make_item, entry) -> None:
    assert engine.score([]) == []
    assert engine.score([entry(make_item(3, 3), PayloadSpec.sampled(), cancelled=lambda: True)]) == [None]


@pytest.mark.parametrize("prompt", [0, 6])
def test_an_empty_prompt_or_response_is_refused(engine: Engine, make_item, entry, prompt: int) -> None:
    item = ScoreItem(make_item(3, 3).token_ids, prompt)
    with pytest.raises(InvalidRequestError, match="prompt_length"):
        engine.score([entry(item, PayloadSpec.sampled())])


def test_ids_outside_the_vocabulary_are_refused(engine: Engine, make_item, entry) -> None:
    for bad in (engine.info.vocab_size, 2**32 - 1):
        item = make_item(3, 3)
        item.token_ids[4] = bad
        with pytest.raises(InvalidRequestError, match=str(bad)):
            engine.score([entry(item, PayloadSpec.sampled())])


def test_what_is_not_announced_is_refused(engine: Engine, make_item, entry) -> None:
    specs = {PayloadKind.GATHER: PayloadSpec.gather(2), PayloadKind.HIDDEN: PayloadSpec.hidden()}
    specs[PayloadKind.FULL] = PayloadSpec.full()
    for kind, spec in specs.items():
        if kind not in engine.info.payloads:
            with pytest.raises(InvalidRequestError, match=str(kind)):
                engine.score([entry(make_item(3, 3, k=2), spec)])
    with pytest.raises(InvalidRequestError, match="serves at most"):
        engine.score([entry(make_item(3, 3), PayloadSpec.topk(engine.info.max_k + 1))])


def test_the_description_is_that_of_the_model(engine: Engine, model_folder: Path) -> None:
    from opd.wire.fingerprint import weights_hash

    info = engine.info
    assert (info.vocab_size, info.padding_rows, info.tokenizer.size) == (260, 60, 260)
    assert info.compute_dtype == "f32"
    assert info.weights_hash == weights_hash(model_folder)
    assert len(info.tokenizer.fingerprint) == len(info.tokenizer.chat_template_hash) == 64
    assert (info.tokenizer.pad_id, info.tokenizer.bos_id, info.tokenizer.eos_id) == (0, 1, 2)
    assert info.stop_token_ids == (2, 7)  # the generation config lists both
    assert {PayloadKind.SAMPLED, PayloadKind.TOPK} <= info.payloads
    assert (info.head is not None) == (PayloadKind.HIDDEN in info.payloads)
