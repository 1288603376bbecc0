"""What is particular to the vLLM adapter: weights, cancellation inside vLLM, families, traps."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from opd.errors import ConfigError, IncompatibleTeacherError, NonFiniteError, UnavailableError
from opd.wire.fingerprint import weights_hash
from opd.wire.types import PayloadKind, PayloadSpec
from teacher_server.engines.engine_topk import SMALLEST_TAIL, log_tail, without_padding
from teacher_server.engines.vllm import VllmEngine, _start
from teacher_server.engines.vllm_generate import generate_request
from teacher_server.residency.weights import LostWeightsError, swap

needs_vllm = [
    pytest.mark.engine,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; `make engines` runs this in an environment of its own",
    ),
]


@pytest.fixture(scope="module", params=["pooling", "generate"])
def vllm(request: pytest.FixtureRequest, make_model) -> Iterator[VllmEngine]:
    engine = VllmEngine(str(make_model("qwen3")), runner=request.param, max_batch_tokens=64, max_num_seqs=16)
    yield engine
    engine.close()


class TestWithVllm:
    pytestmark = needs_vllm

    def test_new_weights_give_the_new_models_numbers_and_bad_ones_change_nothing(
        self, vllm, make_model, make_item, entry, reference_logits
    ) -> None:
        item = make_item(6, 9)
        for seed in (1, 0):  # there and back
            folder = make_model("qwen3", seed=seed)
            vllm.prepare_weights(folder)()
            (scores,) = vllm.score([entry(item, PayloadSpec.topk(1, "f32"))])
            expected = reference_logits(folder, item).log_softmax(-1).max(-1).values
            np.testing.assert_allclose(scores.values[:, 0], expected.numpy(), atol=2e-4)
            assert scores.weights_hash == vllm.info.weights_hash == weights_hash(folder)
            before = vllm.info
            with pytest.raises(IncompatibleTeacherError):
                vllm.prepare_weights(make_model("qwen3", seed=1, intermediate_size=96))()
            exchange = vllm.prepare_weights(make_model("qwen3", seed=2))
            exchange()
            assert vllm.info != before
            exchange()  # back again, as after a failed self-test
            assert vllm.info == before
            (again,) = vllm.score([entry(item, PayloadSpec.topk(1, "f32"))])
            np.testing.assert_allclose(again.values, scores.values, atol=1e-5)

    @pytest.mark.parametrize("runner", ["pooling", "generate"])
    def test_new_weights_of_a_tied_head_are_taken_whole_or_refused(
        self, runner: str, make_model, make_item, entry, reference_logits
    ) -> None:
        old, new, item = make_model("llama"), make_model("llama", seed=1), make_item(6, 9)
        engine = VllmEngine(str(old), runner=runner, max_batch_tokens=64, max_num_seqs=16)
        try:
            if runner == "generate" and not torch.cuda.is_available():
                with pytest.raises(ConfigError, match="tied"):
                    engine.prepare_weights(new)()
                new = old
            else:
                engine.prepare_weights(new)()
            (scores,) = engine.score([entry(item, PayloadSpec.topk(1, "f32"))])
            expected = reference_logits(new, item).log_softmax(-1).max(-1).values
            np.testing.assert_allclose(scores.values[:, 0], expected.numpy(), atol=2e-4)
        finally:
            engine.close()

    def test_new_weights_of_experts_are_refused_on_a_cpu_which_has_packed_the_old_ones(
        self, make_model, make_item, entry, reference_logits
    ) -> None:
        if torch.cuda.is_available():
            pytest.skip("a GPU packs nothing")
        folder, item = make_model("qwen3_moe"), make_item(6, 9)
        engine = VllmEngine(str(folder), max_batch_tokens=64, max_num_seqs=16)
        try:
            with pytest.raises(ConfigError, match=r"packed copy.*engine transformers"):
                engine.prepare_weights(make_model("qwen3_moe", seed=1))
            (scores,) = engine.score([entry(item, PayloadSpec.full())])
            np.testing.assert_allclose(scores.logits, reference_logits(folder, item).numpy(), atol=5e-4)
        finally:
            engine.close()

    def test_when_neither_new_nor_old_weights_can_be_loaded_they_are_lost_and_not_taken_for_the_old_ones(
        self, vllm, make_model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, exchange = vllm.info, vllm.prepare_weights(make_model("qwen3", seed=1))

        def fail(folder: Path) -> None:
            raise RuntimeError("the disk is gone")

        with monkeypatch.context() as broken:
            broken.setattr(vllm, "_reload", fail)
            with pytest.raises(LostWeightsError):
                swap(vllm, exchange, Path("new"), lambda: None)
        vllm._info = before  # nothing was loaded at all here

    def test_a_gather_may_ask_for_as_many_ids_as_are_announced(self, vllm, make_item, entry) -> None:
        if "generate" not in vllm.info.engine:
            pytest.skip("our own head has no such limit")
        k = vllm.info.max_k
        _, params = generate_request(entry(make_item(3, 2, k=k), PayloadSpec.gather(k)))
        params.verify(vllm._engine.vllm_config.model_config, None, None, None)

    def test_a_sequence_cancelled_while_vllm_works_on_it_is_aborted(self, vllm, make_item, entry) -> None:
        polls: list[int] = []
        long, short = make_item(200, 250, seed=1), make_item(4, 4, seed=2)  # 450 tokens at 64 per step

        def cancelled() -> bool:
            polls.append(1)
            return len(polls) > 3

        spec = PayloadSpec.sampled()
        found = vllm.score([entry(long, spec, cancelled=cancelled), entry(short, spec)])
        assert found[0] is None and found[1] is not None
        assert not vllm._engine.has_unfinished_requests()

    def test_a_sleeping_engine_refuses(self, vllm, make_item, entry) -> None:
        batch = [entry(make_item(4, 4), PayloadSpec.sampled())]
        before = vllm.score(batch)[0]
        vllm.sleep()
        with pytest.raises(UnavailableError, match="asleep"):
            vllm.score(batch)
        vllm.wake()
        np.testing.assert_array_equal(vllm.score(batch)[0].sampled, before.sampled)

    @pytest.mark.parametrize("family", ["gemma2", "granite"])
    def test_soft_cap_and_logit_scale_are_applied(
        self, family: str, make_model, make_item, entry, reference_logits
    ) -> None:
        folder, item = make_model(family), make_item(6, 9)
        engine = VllmEngine(str(folder), max_batch_tokens=64, max_num_seqs=16)
        try:
            (scores,) = engine.score([entry(item, PayloadSpec.full())])
            np.testing.assert_allclose(scores.logits, reference_logits(folder, item).numpy(), atol=5e-4)
        finally:
            engine.close()

    @pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
    def test_a_head_is_found_under_any_name_and_beside_a_class_that_vllm_has_changed(
        self, family: str, make_model, make_item, entry, reference_logits
    ) -> None:
        """GPT-2's head is tied to transformer.wte; vLLM runs GPT-NeoX by transformers' own class."""
        item = make_item(6, 9)
        expected = [reference_logits(make_model(family, seed=seed), item) for seed in (0, 1)]
        engine = VllmEngine(str(make_model(family)), max_batch_tokens=64, max_num_seqs=16)
        try:
            for seed, logits in enumerate(expected):
                if seed:
                    engine.prepare_weights(make_model(family, seed=seed))()
                (scores,) = engine.score([entry(item, PayloadSpec.full())])
                np.testing.assert_allclose(scores.logits, logits.numpy(), atol=5e-4)
        finally:
            engine.close()

    def test_a_vllm_that_keeps_the_padding_rows_of_a_head_is_refused(
        self, model_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("teacher_server.engines.vllm.cut_vocabulary", lambda llm, size: None)
        with pytest.raises(ConfigError, match=r"260 ids.*runner pooling"):
            VllmEngine(str(model_folder), runner="generate", max_batch_tokens=64, max_num_seqs=16)

    def test_vllm_refuses_ids_of_the_callers_choice_on_a_cpu_and_so_do_we(self, vllm) -> None:
        if torch.cuda.is_available():
            pytest.skip("a GPU may have the V2 model runner")
        assert (PayloadKind.GATHER in vllm.info.payloads) == ("pooling" in vllm.info.engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"runner": "walk"}, "walk"), ({"deterministic": True}, "deterministic"), ({"device": "cuda:3"}, "cuda:3")],
)
def test_options_that_make_no_sense_are_named(options: dict[str, object], message: str, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmEngine(str(model_folder), **options)


def _keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing that the engine sets outlive a test."""
    for name in (
        "VLLM_NO_USAGE_STATS",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "TORCHDYNAMO_DISABLE",
    ):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_starts_its_processes_anew_since_forked_ones_could_not_use_cuda(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_environment(monkeypatch)
    with pytest.raises(ConfigError):
        _start(model_folder, "pooling", torch.device("cpu"), {})
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install_before_the_model_is_read() -> None:
    with pytest.raises(ConfigError, match=r"opd\[vllm\]"):
        VllmEngine("a/model/that/is/not/there")


def test_taking_padding_rows_out_of_lists_gives_what_a_head_without_them_gives() -> None:
    logits = np.random.default_rng(0).normal(scale=3.0, size=(40, 12))
    whole, cut = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, logits[:, :9]))
    ids = np.argsort(-whole, axis=-1)[:, :7]  # up to three of them are padding rows
    values = np.take_along_axis(whole, ids, -1).astype(np.float32)
    sampled, kept, found = without_padding(
        whole[:, 5].astype(np.float32), ids, values, whole[:, 9:].astype(np.float32), vocabulary=9, k=4
    )
    np.testing.assert_array_equal(kept, np.argsort(-cut, axis=-1)[:, :4])
    np.testing.assert_allclose(found, -np.sort(-cut, axis=-1)[:, :4], atol=2e-6)
    np.testing.assert_allclose(sampled, cut[:, 5], atol=2e-6)


def test_padding_rows_with_all_the_mass_are_an_error() -> None:
    nothing = np.full(1, -30.0, np.float32)
    with pytest.raises(NonFiniteError, match="padding rows"):
        without_padding(nothing, None, None, np.zeros((1, 1), np.float32), vocabulary=9, k=0)


def test_a_tail_from_lists_is_one_minus_the_listed_mass_and_never_below_its_resolution() -> None:
    values = np.log(np.array([[0.5, 0.25], [0.75, 0.25]], np.float32))
    np.testing.assert_allclose(log_tail(values, 9), np.log([0.25, SMALLEST_TAIL]), rtol=1e-6)
    assert np.isneginf(log_tail(values, 2)).all()
