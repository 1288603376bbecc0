"""The vllm_server engine: what it asks a stock vLLM server for, and what it refuses. Scores: test_conformance.py."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine_servers import LIMIT, ROWS, VOCABULARY, FakeVllm
from ports import held_port

from opd.errors import ConfigError, CorruptPayloadError, NonFiniteError, UnavailableError
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from teacher_server.engines.vllm_server import VllmServerEngine


@pytest.fixture
def server(model_folder: Path) -> Iterator[FakeVllm]:
    with closing(FakeVllm(model_folder)) as server:
        yield server


def opened(folder: Path, server: FakeVllm, **options: Any) -> VllmServerEngine:
    return VllmServerEngine(str(folder), url=server.url, timeout=60, **options)


def test_what_it_announces_was_tried(
    server: FakeVllm, model_folder: Path, make_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(opened(model_folder, server, dtype="float32")) as engine:
        info = engine.info
    assert server.url in caplog.text and "0.33.0" in caplog.text  # not the version that was tested
    assert info.engine == "vllm 0.33.0" and info.compute_dtype == "f32" and info.max_sequence_tokens == LIMIT - 1
    assert info.payloads == {PayloadKind.SAMPLED, PayloadKind.TOPK, PayloadKind.GATHER}
    assert not info.supports_temperature and info.max_k == 20
    server.gathers = False
    with pytest.raises(ConfigError, match="60 rows"):
        opened(model_folder, server)
    whole = make_model("qwen3", vocab_size=VOCABULARY)
    with closing(FakeVllm(whole)) as unpadded:
        unpadded.gathers = False
        with closing(opened(whole, unpadded)) as engine:
            assert engine.info.payloads == {PayloadKind.SAMPLED, PayloadKind.TOPK}


def test_a_server_without_the_padding_rows_is_not_asked_for_them(
    model_folder: Path, make_model: Callable[..., Path], make_item: Any, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_engine_servers.ROWS", VOCABULARY)
    with (
        closing(FakeVllm(make_model("qwen3", vocab_size=VOCABULARY))) as server,
        closing(opened(model_folder, server)) as engine,
    ):
        server.requests.clear()
        engine.score([entry(make_item(4, 3, k=2), PayloadSpec.gather(2))])
        (asked,) = server.requests
    assert np.array(asked["sampling_params"]["prompt_logprob_token_ids"]).shape == (3, 3)


def test_a_response_token_among_the_chosen_ids_is_asked_for_once(
    server: FakeVllm, model_folder: Path, entry: Any, reference_logits: Any
) -> None:
    ids = np.array([5, 6, 7, 8], np.uint32)
    item = ScoreItem(ids, 2, np.array([[7, 9], [10, 11]], np.uint32))
    with closing(opened(model_folder, server)) as engine:
        (scores,) = engine.score([entry(item, PayloadSpec.gather(2, "f32"))])
    for row in server.requests[-1]["sampling_params"]["prompt_logprob_token_ids"]:
        known = [token for token in row if token >= 0]
        assert len(known) == len(set(known)) and max(known) == ROWS - 1
    logp = torch.log_softmax(reference_logits(model_folder, item).double(), -1)
    assert scores is not None
    np.testing.assert_allclose(scores.sampled, [logp[0, 7], logp[1, 8]], atol=2e-4)
    np.testing.assert_allclose(scores.values, [logp[0, [7, 9]], logp[1, [10, 11]]], atol=2e-4)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda found: found.update(prompt_token_id_logprobs="AAAA"), CorruptPayloadError),
        (lambda found: found.update(prompt_token_id_logprobs=None), CorruptPayloadError),
        (lambda found: found.update(prompt_logprobs=None), CorruptPayloadError),
        (lambda found: found.get("prompt_logprobs", []).append({}), CorruptPayloadError),
        (lambda found: [each.clear() for each in found.get("prompt_logprobs", [])[1:]], CorruptPayloadError),
        (
            lambda found: [
                value.update(logprob=float("nan"))
                for each in found.get("prompt_logprobs", [])[1:]
                for value in each.values()
            ],
            NonFiniteError,
        ),
        (
            lambda found: [
                value.update(logprob=3.0) for each in found.get("prompt_logprobs", [])[1:] for value in each.values()
            ],
            NonFiniteError,
        ),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(
    server: FakeVllm, model_folder: Path, make_item: Any, entry: Any, spoil: Any, error: type[Exception]
) -> None:
    item = make_item(4, 3, k=2)
    with closing(opened(model_folder, server)) as engine:
        server.spoil = spoil
        with pytest.raises(error):
            engine.score([entry(item, PayloadSpec.topk(2)), entry(item, PayloadSpec.gather(2))])


def test_a_server_that_cannot_be_used_is_named_with_the_flag(server: FakeVllm, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-logprobs"):
        server.most = 8
        opened(model_folder, server)
    server.most, server.models = ROWS, ["one", "two"]
    with pytest.raises(ConfigError, match=r"one, two.*served_name"):
        opened(model_folder, server)
    opened(model_folder, server, served_name="two").close()
    server.key = "secret"
    with pytest.raises(UnavailableError, match="401"):
        opened(model_folder, server, served_name="two")
    for options in ({"deterministic": True}, {"dtype": "int8"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            opened(model_folder, server, served_name="two", api_key="secret", **options)


def test_weights_and_memory_stay_the_servers_own(server: FakeVllm, model_folder: Path) -> None:
    with closing(opened(model_folder, server)) as engine:
        for refused in (lambda: engine.prepare_weights(model_folder), engine.sleep):
            with pytest.raises(ConfigError, match=server.url):
                refused()


@pytest.mark.engine
def test_a_real_server_gives_the_models_numbers(
    make_model: Callable[..., Path], make_item: Any, entry: Any, reference_logits: Any
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; `make engines` runs this in an environment of its own")
    from vllm_rollouts import VllmServer

    folder = make_model("qwen3", vocab_size=VOCABULARY)
    server = VllmServer(folder, held_port(), "--max-logprobs", "64", adapters=False)
    try:
        server.wait()
        with closing(VllmServerEngine(str(folder), url=server.url, max_k=64, dtype="float32")) as engine:
            kinds = engine.info.payloads
            item = make_item(6, 9, k=5)
            specs = [PayloadSpec.sampled(), PayloadSpec.topk(64, "f32")]
            specs += [PayloadSpec.gather(5, "f32")] if PayloadKind.GATHER in kinds else []
            found = engine.score([entry(item, spec) for spec in specs])
    finally:
        server.close()
    logp = torch.log_softmax(reference_logits(folder, item).double(), -1)
    own = logp.gather(-1, torch.from_numpy(item.response_ids.astype(np.int64))[:, None])[:, 0]
    for scores in found:
        assert scores is not None
        np.testing.assert_allclose(scores.sampled, own, atol=2e-4)
        if scores.ids is not None:
            wanted = logp.gather(-1, torch.from_numpy(scores.ids.astype(np.int64)))
            np.testing.assert_allclose(scores.values, wanted, atol=2e-4)
    assert found[1] is not None
    assert np.array_equal(found[1].ids, logp.topk(64).indices)
