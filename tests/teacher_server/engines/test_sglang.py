"""The SGLang adapter against a server with SGLang's fields: what it sends, what it refuses, what it notices."""

import base64
import shutil
import socket
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine_servers import VOCABULARY, FakeSglang
from hostile import WIRES, Wire, lying

from opd.errors import (
    ConfigError,
    CorruptPayloadError,
    IncompatibleTeacherError,
    InvalidRequestError,
    NonFiniteError,
    OpdError,
    UnavailableError,
)
from opd.wire.fingerprint import weights_hash
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem
from teacher_server.engines.sglang import SglangEngine
from teacher_server.engines.sglang_http import SglangClient, token_log_probs


@pytest.fixture
def sglang(sglang_server, model_folder: Path):
    engine = SglangEngine(str(model_folder), url=sglang_server.url, timeout=60)
    yield engine
    engine.close()


def test_it_asks_for_the_response_only_so_that_the_prompt_can_come_from_the_cache(
    sglang, sglang_server, make_item, entry
) -> None:
    item = make_item(40, 5)
    sglang.score([entry(item, PayloadSpec.sampled()), entry(item, PayloadSpec.topk(3))])
    by_k = {body.get("top_logprobs_num", 0): body for body in sglang_server.requests}
    assert set(by_k) == {0, 3, 63}  # padding rows were among the first three: so many more are asked for
    assert all(body["logprob_start_len"] == 39 and len(body["input_ids"]) == 45 for body in by_k.values())
    assert "return_flat_raw_top_logprobs" not in by_k[0]


def test_identity_comes_from_the_folder_and_the_server(sglang, model_folder: Path) -> None:
    assert sglang.info.engine == "sglang 0.5.23"
    assert sglang.info.max_sequence_tokens == 499
    assert sglang.info.payloads == {PayloadKind.SAMPLED, PayloadKind.TOPK}
    assert not sglang.info.supports_temperature


@pytest.mark.parametrize("bad", [260, 512, 2**32 - 1])
def test_an_id_that_would_end_the_server_never_reaches_it(sglang, sglang_server, make_item, entry, bad: int) -> None:
    item = make_item(4, 4)
    item.token_ids[2] = bad
    with pytest.raises(InvalidRequestError):
        sglang.score([entry(make_item(4, 4), PayloadSpec.sampled()), entry(item, PayloadSpec.sampled())])
    assert not sglang_server.dead and not sglang_server.requests


def test_a_signed_minus_one_never_reaches_it(sglang, sglang_server, entry) -> None:
    item = ScoreItem(np.array([3, 4, -1, 5], np.int64), 2)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="-1"):
        sglang.score([entry(item, PayloadSpec.sampled())])
    assert not sglang_server.requests


def _shift(meta: dict[str, Any]) -> None:
    meta["input_token_logprobs"].pop(0)


def _other_ids(meta: dict[str, Any]) -> None:
    meta["input_token_logprobs"][1][1] += 1


def _no_number(meta: dict[str, Any]) -> None:
    meta["input_token_logprobs"][2][0] = "x"


def _two_null_rows(meta: dict[str, Any]) -> None:
    meta["input_top_logprobs_null_prefix"] = 2


def _short_buffer(meta: dict[str, Any]) -> None:
    meta["input_top_logprobs_val_flat_b64"] = base64.b64encode(b"1234").decode()


def _not_base64(meta: dict[str, Any]) -> None:
    meta["input_top_logprobs_idx_flat_b64"] = "!"


def _no_flat_fields(meta: dict[str, Any]) -> None:
    for name in [name for name in meta if name.startswith("input_top_logprobs")]:
        del meta[name]


def _other_dtype(meta: dict[str, Any]) -> None:
    meta["input_top_logprobs_val_flat_b64_dtype"] = "float16"


def _no_padding_rows(meta: dict[str, Any]) -> None:
    del meta["input_token_ids_logprobs"]


def _other_padding_rows(meta: dict[str, Any]) -> None:
    meta["input_token_ids_logprobs"][1][0][1] += 1


def _a_padding_row_without_number(meta: dict[str, Any]) -> None:
    meta["input_token_ids_logprobs"][1][0][0] = "x"


def _an_id_outside_the_vocabulary(meta: dict[str, Any]) -> None:
    ids = np.frombuffer(base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]), np.int32).copy()
    ids[0] = -1
    meta["input_top_logprobs_idx_flat_b64"] = base64.b64encode(ids.tobytes()).decode()


@pytest.mark.parametrize(
    "spoil",
    [
        _shift,
        _other_ids,
        _no_number,
        _two_null_rows,
        _short_buffer,
        _not_base64,
        _no_flat_fields,
        _other_dtype,
        _an_id_outside_the_vocabulary,
        _no_padding_rows,
        _other_padding_rows,
        _a_padding_row_without_number,
    ],
)
def test_an_answer_that_does_not_fit_the_question_is_refused(sglang, sglang_server, make_item, entry, spoil) -> None:
    sglang_server.spoil = spoil
    with pytest.raises(CorruptPayloadError, match=r"SGLang|has the ids"):
        sglang.score([entry(make_item(4, 6), PayloadSpec.topk(3))])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (float("nan"), NonFiniteError),
        (float("inf"), NonFiniteError),
        (None, NonFiniteError),
        (3.0, NonFiniteError),
        ("x", CorruptPayloadError),
    ],
)
def test_a_log_prob_that_is_none_is_refused(
    sglang, sglang_server, make_item, entry, value: float | str | None, error: type[OpdError]
) -> None:
    sglang_server.spoil = lambda meta: meta["input_token_logprobs"][1].__setitem__(0, value)
    with pytest.raises(error):
        sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])


def test_weights_that_someone_else_replaced_are_noticed(sglang, sglang_server, make_item, entry) -> None:
    sglang_server.weight_version = "other"
    with pytest.raises(UnavailableError, match="other"):
        sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])


def test_new_weights_go_through_the_server_and_change_hash_and_numbers(
    sglang, sglang_server, make_model, make_item, entry, reference_logits
) -> None:
    new, item = make_model("qwen3", seed=1), make_item(4, 6)
    sglang.prepare_weights(new)()
    (scores,) = sglang.score([entry(item, PayloadSpec.topk(1, "f32"))])
    assert scores.weights_hash == sglang.info.weights_hash == weights_hash(new)
    expected = reference_logits(new, item).log_softmax(-1).max(-1).values
    np.testing.assert_allclose(scores.values[:, 0], expected.numpy(), atol=2e-4)


def test_old_weights_come_back_from_their_folder_unless_it_changed(
    sglang, sglang_server, make_model, model_folder: Path, tmp_path: Path, make_item, entry
) -> None:
    before = sglang.info
    exchange = sglang.prepare_weights(make_model("qwen3", seed=1))
    exchange()
    exchange()
    assert sglang.info == before
    assert sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])[0].weights_hash == before.weights_hash
    folder = tmp_path / "moving"
    shutil.copytree(make_model("qwen3", seed=1), folder)
    sglang.prepare_weights(folder)()
    exchange = sglang.prepare_weights(make_model("qwen3", seed=2))
    exchange()
    now = sglang.info
    shutil.rmtree(folder)
    shutil.copytree(make_model("qwen3", seed=3), folder)
    with pytest.raises(ConfigError, match="changed"):
        exchange()
    assert sglang.info == now


def test_weights_that_do_not_fit_never_reach_the_server(sglang, sglang_server, make_model) -> None:
    before = sglang.info
    with pytest.raises(IncompatibleTeacherError):
        sglang.prepare_weights(make_model("qwen3", seed=1, intermediate_size=96))()
    assert "/update_weights_from_disk" not in sglang_server.calls and sglang.info == before


def test_a_load_that_failed_is_followed_by_one_of_the_old_weights(
    sglang, sglang_server, make_model, model_folder: Path, make_item, entry, reference_logits
) -> None:
    """The server holds the new weights then, under the version of the old ones."""
    before, item = sglang.info, make_item(4, 6)
    sglang_server.fails = 1
    with pytest.raises(ConfigError, match="no space"):
        sglang.prepare_weights(make_model("qwen3", seed=1))()
    assert sglang.info == before
    (scores,) = sglang.score([entry(item, PayloadSpec.topk(1, "f32"))])
    expected = reference_logits(model_folder, item).log_softmax(-1).max(-1).values
    np.testing.assert_allclose(scores.values[:, 0], expected.numpy(), atol=2e-4)


def test_nothing_is_scored_with_weights_that_are_not_known(sglang, sglang_server, make_model, make_item, entry) -> None:
    sglang_server.fails = 2
    with pytest.raises(ConfigError, match="no space"):
        sglang.prepare_weights(make_model("qwen3", seed=1))()
    with pytest.raises(UnavailableError, match="not known"):
        sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])
    sglang.prepare_weights(make_model("qwen3", seed=1))()
    assert sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])[0].weights_hash == sglang.info.weights_hash


def test_rows_whose_client_hung_up_do_not_keep_new_weights_out(sglang, sglang_server, make_model) -> None:
    new = make_model("qwen3", seed=1)
    sglang_server.unflushed = True
    sglang.prepare_weights(new)()
    assert sglang.info.weights_hash == weights_hash(new) == sglang_server.weight_version


def test_a_server_that_would_release_no_memory_is_not_put_to_sleep(sglang_server, model_folder: Path) -> None:
    sglang_server.saves_memory = False
    engine = SglangEngine(str(model_folder), url=sglang_server.url, timeout=60)
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        engine.sleep()
    engine.close()
    assert "/release_memory_occupation" not in sglang_server.calls


def test_an_answer_may_hold_the_last_id_of_the_head(make_model, entry, reference_logits) -> None:
    folder = make_model("qwen3", vocab_size=VOCABULARY)
    item = ScoreItem(np.array([5, VOCABULARY - 1, 0, VOCABULARY - 1], np.uint32), 1)
    with (
        closing(FakeSglang(folder)) as server,
        closing(SglangEngine(str(folder), url=server.url, timeout=60)) as engine,
    ):
        (scores,) = engine.score([entry(item, PayloadSpec.sampled())])
    logp = reference_logits(folder, item).log_softmax(-1)
    expected = logp.gather(1, torch.tensor(item.response_ids.astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(scores.sampled, expected.numpy(), atol=2e-4)


def test_a_sequence_of_the_most_tokens_that_are_announced_is_scored(sglang, make_item, entry) -> None:
    longest = sglang.info.max_sequence_tokens
    assert sglang.score([entry(make_item(longest - 2, 2), PayloadSpec.sampled())])[0] is not None


def test_waking_loads_the_weights_again_because_sleep_loses_them(sglang, sglang_server, make_item, entry) -> None:
    sglang.sleep()
    with pytest.raises(UnavailableError, match="asleep"):
        sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])
    sglang_server.status = ("/update_weights_from_disk", 400)
    with pytest.raises(ConfigError):
        sglang.wake()
    with pytest.raises(UnavailableError, match="asleep"):  # half awake is not awake
        sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])
    sglang_server.status = None
    sglang.wake()
    assert sglang_server.calls[-2:] == ["/resume_memory_occupation", "/update_weights_from_disk"]
    assert sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])[0] is not None


def test_cancelled_items_are_not_sent(sglang, sglang_server, make_item, entry) -> None:
    found = sglang.score([entry(make_item(4, 6), PayloadSpec.sampled(), cancelled=lambda: True)] * 3)
    assert found == [None] * 3 and not sglang_server.requests


def test_an_error_of_the_server_is_unavailable_with_its_reason(sglang, sglang_server, make_item, entry) -> None:
    sglang_server.status = ("/generate", 503)
    with pytest.raises(UnavailableError, match=r"503.*told to fail"):
        sglang.score([entry(make_item(4, 6), PayloadSpec.sampled())])


@pytest.mark.parametrize("lie", WIRES.values(), ids=WIRES)
def test_a_server_that_lies_is_unavailable_or_its_answer_corrupt(lie: Wire) -> None:
    with lying(lie) as liar, pytest.raises((UnavailableError, CorruptPayloadError)):
        engine = SglangClient(liar.url, None, None, 0.3)
        token_log_probs(engine.call("/generate", {}, most_bytes=1_000_000), [1], 320, liar.url)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", b"no HTTP\r\n\r\n", b""])
def test_a_server_that_breaks_off_is_unavailable(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        client = SglangClient(f"http://127.0.0.1:{listener.getsockname()[1]}", None, None, 30.0)
        with pytest.raises(UnavailableError, match="cannot be reached"):
            client.call("/generate", {})
        thread.join()


def test_the_key_is_sent(sglang_server, model_folder: Path) -> None:
    sglang_server.key = "secret"
    with pytest.raises(UnavailableError, match="401"):
        SglangEngine(str(model_folder), url=sglang_server.url)
    SglangEngine(str(model_folder), url=sglang_server.url, api_key="secret").close()


def test_a_server_that_is_not_there_or_serves_another_family_is_named(sglang_server, model_folder, make_model) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{port}"):
        SglangEngine(str(model_folder), url=f"http://127.0.0.1:{port}", timeout=5)
    with pytest.raises(IncompatibleTeacherError, match="qwen3"):
        SglangEngine(str(make_model("llama")), url=sglang_server.url)
    with pytest.raises(ConfigError, match="url"):
        SglangEngine(str(model_folder), url="127.0.0.1:1")
