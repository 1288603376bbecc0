"""SGLang's route: the numbers of the gRPC service, in the form that slime and miles read."""

import base64
from typing import Any

import numpy as np
import pytest

from opd.wire.types import PayloadSpec

IDS = [11, 2, 83, 4, 5]


def body(ids: Any, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0} | fields


def values(entries: Any) -> np.ndarray[Any, Any]:
    return np.float32([[value for value, _, _ in row] for row in entries])


def ids_of(entries: Any) -> list[list[int]]:
    return [[id_ for _, id_, _ in row] for row in entries]


async def test_every_token_has_its_log_prob_and_the_first_has_none(door: Any) -> None:
    caller = await door()
    answer = await caller.ok("/generate", body(IDS))
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"][0] == [None, 11, None]
    rows = meta["input_token_logprobs"][1:]
    truth = await caller.truth(IDS, PayloadSpec.sampled())
    assert np.array_equal(np.float32([value for value, _, _ in rows]), truth.sampled)
    assert [id_ for _, id_, _ in rows] == IDS[1:]
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert meta["weight_version"] == (await caller.grpc.info()).weights_hash


async def test_a_batch_is_answered_in_its_order(door: Any, sequences: Any) -> None:
    caller = await door()
    answers = await caller.ok("/generate", body(sequences, rid=["a", "b", "c"], top_logprobs_num=3))
    assert [one["meta_info"]["id"] for one in answers] == ["a", "b", "c"]
    for ids, answer in zip(sequences, answers, strict=True):
        top = answer["meta_info"]["input_top_logprobs"]
        truth = await caller.truth(ids, PayloadSpec.topk(3, "f32"))
        assert top[0] is None and len(top) == len(ids)
        assert np.array_equal(values(top[1:]), truth.values) and ids_of(top[1:]) == truth.ids.tolist()


async def test_a_sequence_of_several_blocks_is_answered_whole(door: Any) -> None:
    caller, ids = await door(), [(7 * n) % 97 for n in range(600)]
    positions = [[] if n % 3 else [n % 97, (n + 5) % 97] for n in range(600)]
    meta = (await caller.ok("/generate", body(ids, token_ids_logprob_positions=positions)))["meta_info"]
    truth = await caller.truth(ids, PayloadSpec.sampled())
    assert np.array_equal(np.float32([one[0] for one in meta["input_token_logprobs"][1:]]), truth.sampled)
    assert [row[1] for row in meta["input_token_logprobs"]] == ids
    assert ids_of(meta["input_token_ids_logprobs"][1:]) == positions[1:]


async def test_a_batch_may_repeat_a_setting_for_each_sequence_but_not_mix_them(door: Any, sequences: Any) -> None:
    caller = await door()
    repeated = {"logprob_start_len": [0, 0, 0], "top_logprobs_num": [2, 2, 2], "rid": ["a", "b", "c"]}
    plain = body(sequences, top_logprobs_num=2, rid=["a", "b", "c"])
    assert await caller.ok("/generate", body(sequences, **repeated)) == await caller.ok("/generate", plain)
    mixed = body(sequences, top_logprobs_num=[1, 2, 2])
    assert "top_logprobs_num differs" in await caller.refused("/generate", mixed)


async def test_a_start_leaves_out_what_comes_before_it(door: Any) -> None:
    caller = await door()
    meta = (await caller.ok("/generate", body(IDS, logprob_start_len=2, top_logprobs_num=2)))["meta_info"]
    truth = await caller.truth(IDS, PayloadSpec.topk(2, "f32"), start=2)
    assert meta["input_token_logprobs"][0] == [None, 83, None] and meta["input_top_logprobs"][0] is None
    assert np.array_equal(np.float32([one[0] for one in meta["input_token_logprobs"][1:]]), truth.sampled)
    assert np.array_equal(values(meta["input_top_logprobs"][1:]), truth.values)


async def test_ids_of_ones_own_are_scored_at_every_position(door: Any) -> None:
    caller = await door()
    meta = (await caller.ok("/generate", body(IDS, token_ids_logprob=[7, 96, 0])))["meta_info"]
    truth = await caller.truth(IDS, PayloadSpec.gather(3, "f32"), gather=[[7, 96, 0]] * 4)
    found = meta["input_token_ids_logprobs"]
    assert found[0] is None and ids_of(found[1:]) == [[7, 96, 0]] * 4
    assert np.array_equal(values(found[1:]), truth.values)


async def test_each_position_may_have_ids_of_its_own_and_some_none(door: Any) -> None:
    caller = await door()
    meta = (await caller.ok("/generate", body(IDS, token_ids_logprob_positions=[[], [], [], [5, 7], [9, 11, 3]])))[
        "meta_info"
    ]
    found = meta["input_token_ids_logprobs"]
    assert found[:3] == [None, [], []] and ids_of(found[3:]) == [[5, 7], [9, 11, 3]]
    asked = [[0, 1, 2], [0, 1, 2], [5, 7, 0], [9, 11, 3]]
    truth = await caller.truth(IDS, PayloadSpec.gather(3, "f32"), gather=asked)
    assert np.array_equal(values(found[3:4])[0], truth.values[2, :2])
    assert np.array_equal(values(found[4:])[0], truth.values[3])
    assert len(meta["input_token_logprobs"]) == len(IDS)


@pytest.mark.parametrize("encoded", [False, True])
async def test_the_likeliest_may_come_as_flat_arrays(door: Any, encoded: bool) -> None:
    caller = await door()
    flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": encoded}
    meta = (await caller.ok("/generate", body(IDS, top_logprobs_num=3, **flags)))["meta_info"]
    assert meta["input_top_logprobs_shape"] == [4, 3] and meta["input_top_logprobs_null_prefix"] == 1
    if encoded:
        assert meta["input_top_logprobs_val_flat_b64_dtype"] == "float32"
        assert meta["input_top_logprobs_idx_flat_b64_dtype"] == "int32"
        flat = np.frombuffer(base64.b64decode(meta["input_top_logprobs_val_flat_b64"]), "<f4")
        ids = np.frombuffer(base64.b64decode(meta["input_top_logprobs_idx_flat_b64"]), "<i4")
    else:
        flat, ids = np.float32(meta["input_top_logprobs_val_flat"]), np.array(meta["input_top_logprobs_idx_flat"])
    truth = await caller.truth(IDS, PayloadSpec.topk(3, "f32"))
    assert np.array_equal(flat.reshape(4, 3), truth.values) and np.array_equal(ids.reshape(4, 3), truth.ids)
    assert "input_top_logprobs" not in meta


async def test_another_temperature_is_asked_for_in_our_own_field(door: Any) -> None:
    caller = await door()
    meta = (await caller.ok("/generate", body(IDS, opd={"temperature": 1.7})))["meta_info"]
    truth = await caller.truth(IDS, PayloadSpec.sampled(), temperature=1.7)
    assert np.array_equal(np.float32([one[0] for one in meta["input_token_logprobs"][1:]]), truth.sampled)
    warm = {"temperature": 1.7, "max_new_tokens": 0}
    assert "opd" in await caller.refused("/generate", body(IDS, sampling_params=warm))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sampling_params": {"max_new_tokens": 8}}, "max_new_tokens"),
        ({"sampling_params": {}}, "max_new_tokens"),
        ({"sampling_params": [{"max_new_tokens": 0}]}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": 0, "n": 2}}, "n is 2"),
        ({"return_logprob": False}, "return_logprob"),
        ({"logprob_start_len": None}, "logprob_start_len"),
        ({"logprob_start_len": -1}, "logprob_start_len"),
        ({"logprob_start_len": 4}, "none behind start 4"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": None, "text": "two words"}, "text"),
        ({"image_data": ["aaaa"]}, "image_data"),
        ({"lora_path": "math"}, "lora_path"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"return_text_in_logprobs": True}, "return_text_in_logprobs"),
        ({"stream": True}, "stream"),
        ({"top_logprobs_num": 2, "token_ids_logprob": [1]}, "two requests"),
        ({"token_ids_logprob": [1], "token_ids_logprob_positions": [[1]] * 5}, "exclude"),
        ({"token_ids_logprob": []}, "names no id"),
        ({"token_ids_logprob": [97]}, "97"),
        ({"token_ids_logprob": [1, 1]}, "repeats"),
        ({"token_ids_logprob": [[1]]}, "token ids"),
        ({"token_ids_logprob": 3}, "token_ids_logprob"),
        ({"token_ids_logprob_positions": [[1]] * 3}, "3 rows"),
        ({"token_ids_logprob_positions": [[]] * 5}, "names no id"),
        ({"token_ids_logprob_positions": {}}, "rows"),
        ({"return_flat_raw_top_logprobs_b64": True}, "return_flat_raw_top_logprobs"),
        ({"rid": 5}, "rid"),
    ],
)
async def test_generate_refuses_what_it_cannot_give_exactly(door: Any, fields: Any, name: str) -> None:
    caller = await door()
    assert name in await caller.refused("/generate", body(IDS, **fields))
    await caller.grpc.settled()
