"""The reference engine: families, determinism, shortcuts, weights, sleep, refusals."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import engine_numbers as numbers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow

from opd.errors import ConfigError, InvalidRequestError, NonFiniteError
from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.engines.backbone import Backbone
from teacher_server.engines.base import EngineItem
from teacher_server.engines.transformers import TransformersEngine
from tests.support.families import tiny


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "cohere", "phi", "falcon_h1"])
def test_families_are_exact_alone_padded_and_shared(
    family: str, make_model, make_item, entry, reference_logits
) -> None:
    folder = make_model(family)
    engine = TransformersEngine(str(folder))
    assert engine._abilities.padding
    assert engine._abilities.sharing == (family != "falcon_h1")  # recurrent state is not shared
    groups = [make_item(60, 3 + 4 * i, seed=i, prompt_seed=i % 2) for i in range(8)]  # two prompts, four samples each
    others = [make_item(5 + i, 9, seed=50 + i) for i in range(3)]
    batch = [entry(item, PayloadSpec.sampled()) for item in groups + others]
    plan = engine._plan([one.item for one in batch])
    assert any(one.shared for one in plan) == (family != "falcon_h1")
    for one, scores in zip(batch, engine.score(batch), strict=True):
        numbers.close(scores, reference_logits(folder, one.item), one.item)


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba"])
def test_a_model_without_attention_is_exact_and_shares_nothing(
    family: str, make_model, make_item, entry, reference_logits
) -> None:
    folder = make_model(family, state_size=8)
    engine = TransformersEngine(str(folder))
    assert not engine._abilities.sharing
    batch = [entry(make_item(20, 3 + 4 * i, seed=i, prompt_seed=0), PayloadSpec.sampled()) for i in range(4)]
    for one, scores in zip(batch, engine.score(batch), strict=True):
        numbers.close(scores, reference_logits(folder, one.item), one.item)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_long_row_does_not_scale_the_positions_of_shorter_ones(
    deterministic: bool, make_model, make_item, entry
) -> None:
    """Longrope takes its long factors for all rows of a forward with one position beyond the original length."""
    engine = TransformersEngine(str(make_model("phi3")), deterministic=deterministic)
    lengths = [(8, 12), (8, 24), (8, 25), (8, 26), (8, 40), (30, 2), (30, 3), (30, 4), (30, 20)]
    batch = [entry(make_item(*one, seed=i, prompt_seed=one[0]), PayloadSpec.sampled()) for i, one in enumerate(lengths)]
    for one, scores in zip(batch, engine.score(batch), strict=True):
        (alone,) = engine.score([one])
        np.testing.assert_allclose(scores.sampled, alone.sampled, atol=1e-4)


def test_packed_rows_equal_rows_alone(make_model, make_item, reference_logits) -> None:
    engine = TransformersEngine(str(make_model("gemma2")))
    items = [make_item(4 + i, 5 * i + 1, seed=i) for i in range(5)]
    with torch.inference_mode():
        packed = engine._backbone.packed(items)
        alone = torch.cat([engine._backbone.alone(item) for item in items])
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["topk", "gather", "hidden", "full"])
def test_deterministic_numbers_are_bit_equal_alone_in_a_batch_and_shuffled(
    kind: str, make_model, make_item, entry
) -> None:
    engine = TransformersEngine(str(make_model("llama")), deterministic=True, logit_bytes=1 << 15)
    assert engine.info.deterministic
    spec = {"topk": PayloadSpec.topk(9), "gather": PayloadSpec.gather(4)}.get(kind) or getattr(PayloadSpec, kind)()
    items = [make_item(30, 11 + 13 * i, seed=i, k=4, prompt_seed=0) for i in range(7)]
    batch = [entry(item, spec) for item in items]
    alone = [numbers.bits(engine.score([one])[0]) for one in batch]
    assert [numbers.bits(scores) for scores in engine.score(batch)] == alone
    order = np.random.default_rng(0).permutation(7)
    assert [numbers.bits(scores) for scores in engine.score([batch[i] for i in order])] == [alone[i] for i in order]
    mixed = [batch[0], entry(items[1], PayloadSpec.sampled(), 2.0), batch[2]]
    assert [numbers.bits(scores) for scores in engine.score(mixed)][::2] == [alone[0], alone[2]]


KINDS = ("sampled", "topk", "gather", "hidden", "full")


@pytest.fixture(scope="module", params=[1, *slow(2)], ids=["one thread", "two threads"])
def settled(request: pytest.FixtureRequest, make_model) -> Iterator[TransformersEngine]:
    """In deterministic mode, with room for 15 rows of logits at once and for a handful of rows in one forward."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield TransformersEngine(str(make_model("qwen3")), deterministic=True, logit_bytes=1 << 15, max_batch_tokens=120)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def crowd(settled: TransformersEngine, make_item, entry) -> tuple[list[EngineItem], list[str]]:
    """Rows of 2 to 130 tokens, payloads and temperatures of all kinds, and each one's bits when it is asked alone."""
    draw = np.random.default_rng(5)
    specs = [PayloadSpec.sampled(), PayloadSpec.topk(7), PayloadSpec.gather(4, "f32"), PayloadSpec.hidden()]
    specs += [PayloadSpec.full(), PayloadSpec.topk(3, "u16"), PayloadSpec.hidden("f32")]
    rows = []
    for i in range(21):
        prompt, response = int(draw.integers(1, 60)), int(draw.integers(1, 70))
        item = make_item(prompt, response, seed=i, k=4)
        rows.append(entry(item, specs[i % len(specs)], float(draw.choice([1.0, 0.7, 2.0]))))
    return rows, [numbers.bits(settled.score([row])[0]) for row in rows]


@settings(max_examples=15)
@given(st.data())
def test_a_rows_bits_depend_on_no_other_row_of_its_batch(settled: TransformersEngine, crowd, data) -> None:
    rows, alone = crowd
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=30))  # repeated and in any order
    assert [numbers.bits(scores) for scores in settled.score([rows[i] for i in chosen])] == [alone[i] for i in chosen]


@pytest.mark.parametrize("kind", ["topk", "hidden", *slow("sampled", "gather", "full")])
def test_a_rows_bits_do_not_depend_on_the_cut_of_the_batch(kind: str, make_model, make_item, entry) -> None:
    spec = {"topk": PayloadSpec.topk(9), "gather": PayloadSpec.gather(4)}.get(kind) or getattr(PayloadSpec, kind)()
    batch = [entry(make_item(5 + i, 1 + 3 * i, seed=i, k=4), spec) for i in range(12)]
    found = set()
    for tokens, logits in ((16, 1), (64, 1 << 15), (1 << 14, 1 << 28)):
        engine = TransformersEngine(
            str(make_model("qwen3")), deterministic=True, max_batch_tokens=tokens, logit_bytes=logits
        )
        found.add(tuple(numbers.bits(scores) for scores in engine.score(batch)))
    assert len(found) == 1


def test_deterministic_rows_of_one_width_share_a_forward(make_model, make_item, entry) -> None:
    engine = TransformersEngine(str(make_model("llama")), deterministic=True)
    shapes: list[tuple[int, ...]] = []
    engine._backbone.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    lengths = (12, 17, 9, 30, 14, 33)  # one less goes through the model
    engine.score([entry(make_item(5, length - 5), PayloadSpec.sampled()) for length in lengths])
    assert shapes == [(2, 32), (4, 16)]


def test_where_bits_depend_on_the_batch_deterministic_rows_run_by_themselves(
    make_model, make_item, entry, monkeypatch, caplog
) -> None:
    padded = Backbone.padded

    def crowded(self: Backbone, items: list[ScoreItem], width: int = 0) -> torch.Tensor:
        return padded(self, items, width) * (1 + 1e-7 * (len(items) > 2))

    monkeypatch.setattr(Backbone, "padded", crowded)
    engine = TransformersEngine(str(make_model("llama")), deterministic=True)
    assert engine.info.deterministic
    assert "runs every row by itself" in caplog.text
    batch = [entry(make_item(5, 9, seed=i), PayloadSpec.topk(5)) for i in range(4)]
    alone = [numbers.bits(engine.score([one])[0]) for one in batch]
    assert [numbers.bits(scores) for scores in engine.score(batch)] == alone


def test_padding_to_a_settled_width_stays_within_the_positions_that_the_model_has(
    make_model, make_item, entry, reference_logits
) -> None:
    folder = make_model("gpt2", max_position_embeddings=40)  # learned positions: a 41st does not exist
    engine, item = TransformersEngine(str(folder), deterministic=True), make_item(20, 20)
    numbers.close(engine.score([entry(item, PayloadSpec.sampled())])[0], reference_logits(folder, item), item)


def test_samples_of_one_prompt_send_it_through_the_model_once(make_model, make_item, entry) -> None:
    def tokens(share: bool) -> int:
        engine = TransformersEngine(str(make_model("llama")), share_prompts=share)
        seen: list[int] = []
        engine._backbone.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        engine.score([entry(make_item(200, 11, seed=i, prompt_seed=0), PayloadSpec.sampled()) for i in range(8)])
        return sum(seen)

    assert tokens(share=True) == 200 + 8 * 10
    assert tokens(share=False) == 8 * 210


def test_a_shared_prompt_is_reused_by_the_passes_of_its_group(make_model, make_item, entry, reference_logits) -> None:
    folder = make_model("gemma2")
    engine = TransformersEngine(str(folder), max_batch_tokens=150)
    widths: list[tuple[int, int]] = []
    engine._backbone.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    items = [make_item(140, 40, seed=i, prompt_seed=0) for i in range(6)]
    found = engine.score([entry(item, PayloadSpec.sampled()) for item in items])
    assert widths == [(1, 140), (3, 39), (3, 39)]
    for item, scores in zip(items, found, strict=True):
        numbers.close(scores, reference_logits(folder, item), item)


def test_the_models_memory_of_a_prompt_does_not_outlive_the_batch(make_model, make_item, entry) -> None:
    engine = TransformersEngine(str(make_model("llama")))
    engine.score([entry(make_item(200, 11, seed=i, prompt_seed=0), PayloadSpec.sampled()) for i in range(8)])
    assert engine._backbone._prefix is None


def test_cancellation_is_polled_before_each_forward(make_model, make_item, entry) -> None:
    engine = TransformersEngine(str(make_model("llama")), max_batch_tokens=20)
    forwards: list[int] = []
    engine._backbone.model.register_forward_pre_hook(lambda module, args: forwards.append(1))
    batch = [
        entry(make_item(10, 10, seed=i), PayloadSpec.sampled(), cancelled=lambda: len(forwards) >= 2) for i in range(5)
    ]
    found = engine.score(batch)
    assert len(forwards) == 2 and sum(scores is not None for scores in found) == 2


def test_nan_in_the_model_is_an_error_that_names_the_teacher(make_model, make_item, entry) -> None:
    folder = make_model("llama")
    engine = TransformersEngine(str(folder))
    with torch.no_grad():
        engine._model.get_output_embeddings().weight[3, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=str(folder)):
        engine.score([entry(make_item(5, 5), PayloadSpec.sampled())])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_follows_f32_within_its_rounding(
    dtype: str, make_model, make_item, entry, reference_logits
) -> None:
    folder = make_model("llama")
    engine = TransformersEngine(str(folder), dtype=dtype)
    item = make_item(5, 12)
    assert engine.info.compute_dtype == engine.info.head.dtype == dtype
    numbers.close(engine.score([entry(item, PayloadSpec.sampled())])[0], reference_logits(folder, item), item, atol=0.5)
    assert engine.head().weight.dtype == (np.uint16 if dtype == "bf16" else np.float16)


def test_a_family_whose_logits_cannot_be_reproduced_is_refused(make_model, monkeypatch) -> None:
    monkeypatch.setattr("teacher_server.engines.transformers.scale_and_cap", lambda config: (1.0, 0.0))
    with pytest.raises(ConfigError, match="granite"):
        TransformersEngine(str(make_model("granite")))


def test_a_shortcut_that_changes_numbers_is_switched_off(make_model, monkeypatch) -> None:
    shared = Backbone.shared
    monkeypatch.setattr(Backbone, "shared", lambda self, items: shared(self, items) * 1.01)
    engine = TransformersEngine(str(make_model("llama")))
    assert engine._abilities.padding and not engine._abilities.sharing


def test_a_model_without_tokenizer_files_has_an_empty_fingerprint(make_model, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(make_model("llama") / name, folder)
    info = TransformersEngine(str(folder)).info
    assert info.tokenizer.fingerprint == ""
    assert (info.vocab_size, info.padding_rows) == (320, 0)  # nothing says which rows of the head count: all do


def test_a_damaged_tokenizer_is_named(make_model, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(make_model("llama"), folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        TransformersEngine(str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "abacus"}, "abacus"),
        ({"device": "xla"}, "'xla' is not available"),
        ({"device": "cuda:99"}, "'cuda:99' is not available"),
        ({"dtype": "f8"}, "f8"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"logit_bytes": 0}, "logit_bytes"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], message: str, make_model) -> None:
    with pytest.raises(ConfigError, match=message):
        TransformersEngine(str(make_model("llama")), **options)


def test_a_wrong_device_is_named_before_the_model_is_read() -> None:
    with pytest.raises(ConfigError, match=r"device 'gpu' .*torch"):
        TransformersEngine("a/model/that/is/not/there", device="gpu")


def test_the_soft_cap_on_attention_logits_is_kept(make_model, make_item, entry, reference_logits) -> None:
    folder, item = make_model("gemma2", attn_logit_softcapping=0.5), make_item(9, 12)
    (scores,) = TransformersEngine(str(folder)).score([entry(item, PayloadSpec.full())])
    np.testing.assert_allclose(scores.logits, reference_logits(folder, item).numpy(), atol=2e-4)
    with pytest.raises(ConfigError, match="soft-cap"):
        TransformersEngine(str(folder), attention="sdpa")


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="nowhere"):
        TransformersEngine(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        TransformersEngine(str(tmp_path))
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ConfigError, match="is a file"):
        TransformersEngine(str(tmp_path / "file"))


def test_a_sequence_longer_than_the_model_is_refused(make_model, make_item, entry) -> None:
    engine = TransformersEngine(str(make_model("llama")))
    with pytest.raises(InvalidRequestError, match="takes at most 512"):
        engine.score([entry(make_item(500, 13), PayloadSpec.sampled())])


def test_a_model_announces_the_positions_that_it_has_under_any_name(tmp_path: Path) -> None:
    lm = tiny("mpt", max_seq_len=40)
    del lm.config.max_position_embeddings, lm.config.n_positions  # which an MPT does not have
    lm.save_pretrained(tmp_path)
    assert TransformersEngine(str(tmp_path)).info.max_sequence_tokens == 40


@pytest.mark.parametrize("way", ["padded", "shared"])
def test_a_shortcut_that_changes_numbers_only_beyond_a_window_is_switched_off(
    way: str, make_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = getattr(Backbone, way)

    def changed(self: Backbone, items: list[ScoreItem], *width: int) -> torch.Tensor:
        return run(self, items, *width) * (1.01 if max(len(item.token_ids) for item in items) > 64 else 1.0)

    monkeypatch.setattr(Backbone, way, changed)
    abilities = TransformersEngine(str(make_model("gemma2", sliding_window=64)))._abilities
    assert (abilities.padding, abilities.sharing) == (way != "padded", way != "shared")


def test_a_row_is_padded_to_no_length_at_which_its_positions_are_scaled(make_model, make_item, entry) -> None:
    engine = TransformersEngine(str(make_model("phi3", original_max_position_embeddings=36)), deterministic=True)
    one = entry(make_item(8, 26), PayloadSpec.sampled())
    (found,) = engine.score([one])
    with torch.inference_mode():
        logits = engine._head().logits(engine._backbone.alone(one.item))
    wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(one.item.response_ids.astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(found.sampled, wanted.numpy(), atol=1e-4)
