"""vLLM's routes: the numbers of the gRPC service, in the form that vLLM's clients read."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from opd.wire.types import PayloadSpec

K = 6


def array(encoded: str) -> np.ndarray[Any, Any]:
    return np.load(io.BytesIO(base64.b64decode(encoded)))


def completion(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "t", "prompt": prompt, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": K} | fields


def generation(ids: list[int], **sampling: Any) -> dict[str, Any]:
    return {"model": "t", "token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0} | sampling}


async def check(caller: Any, ids: list[int], entries: Any, k: int = K, **asked: Any) -> None:
    """Compare the entries of a sequence with the gRPC answer, to the last bit of float32."""
    truth = await caller.truth(ids, PayloadSpec.topk(k, "f32"), **asked)
    full = await caller.truth(ids, PayloadSpec.full(), **asked)
    assert entries[0] is None and len(entries) == len(ids)
    for row, (entry, own) in enumerate(zip(entries[1:], ids[1:], strict=True)):
        assert next(iter(entry)) == str(own)
        assert np.float32(entry[str(own)]["logprob"]) == truth.sampled[row]
        assert entry[str(own)]["rank"] == 1 + (full.logits[row] > full.logits[row, own]).sum()
        top = sorted(entry.items(), key=lambda pair: pair[1]["rank"])[:k]
        assert [int(id_) for id_, _ in top] == truth.ids[row].tolist()
        assert np.array_equal(np.float32([one["logprob"] for _, one in top]), truth.values[row])
        assert len(entry) == k + (own not in truth.ids[row])


async def test_completions_give_every_token_and_the_k_likeliest_with_their_ranks(door: Any, sequences: Any) -> None:
    caller = await door()
    answer = await caller.ok("/v1/completions", completion(sequences))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for ids, choice in zip(sequences, answer["choices"], strict=True):
        await check(caller, ids, choice["prompt_logprobs"])
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["model"] == "t" and answer["usage"]["prompt_tokens"] == sum(map(len, sequences))
    assert answer["system_fingerprint"] == (await caller.grpc.info()).weights_hash


async def test_a_sequence_of_several_blocks_is_answered_whole(door: Any) -> None:
    caller, ids = await door(), [(7 * n) % 97 for n in range(600)]
    answer = await caller.ok("/v1/completions", completion(ids))
    await check(caller, ids, answer["choices"][0]["prompt_logprobs"])


async def test_one_prompt_may_come_without_a_list_around_it(door: Any, sequences: Any) -> None:
    caller = await door()
    answer = await caller.ok("/v1/completions", completion(sequences[0], max_tokens=0))
    await check(caller, sequences[0], answer["choices"][0]["prompt_logprobs"])


async def test_no_others_are_listed_for_k_of_0(door: Any, sequences: Any) -> None:
    caller = await door()
    answer = await caller.ok("/v1/completions", completion(sequences[0], prompt_logprobs=0))
    listed = await caller.ok("/v1/completions", completion(sequences[0]))
    for few, many in zip(*(one["choices"][0]["prompt_logprobs"][1:] for one in (answer, listed)), strict=True):
        own = next(iter(few))
        assert few == {own: many[own]}


async def test_the_temperature_is_the_teachers_and_0_means_1(door: Any, sequences: Any) -> None:
    caller = await door()
    warm = await caller.ok("/v1/completions", completion(sequences[0], temperature=1.7))
    await check(caller, sequences[0], warm["choices"][0]["prompt_logprobs"], temperature=1.7)
    extra = await caller.ok("/v1/completions", completion(sequences[0], opd={"temperature": 1.7}))
    greedy, plain = [await caller.ok("/v1/completions", completion(sequences[0], temperature=t)) for t in (0, 1)]
    assert extra["choices"] == warm["choices"] and greedy["choices"] == plain["choices"] != warm["choices"]


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/api/v1/generate"])
async def test_generate_gives_the_same_entries_as_completions(door: Any, sequences: Any, path: str) -> None:
    caller = await door()
    answer = await caller.ok(path, generation(sequences[1], prompt_logprobs=K))
    await check(caller, sequences[1], answer["prompt_logprobs"])
    assert answer["prompt_token_id_logprobs"] is None
    assert answer["choices"][0]["token_ids"] == []


async def test_generate_scores_chosen_ids_from_a_start_on(door: Any) -> None:
    caller, ids = await door(), [11, 2, 83, 4, 5]
    chosen = [[5, 96, 0], [4, 1, 2]]
    answer = await caller.ok(
        "/inference/v1/generate",
        generation(ids, prompt_logprob_token_ids=chosen, prompt_logprob_start=2) | {"opd": {"log_tail": True}},
    )
    truth = await caller.truth(ids, PayloadSpec.gather(3, "f32"), start=2, gather=chosen)
    assert np.array_equal(array(answer["prompt_token_id_logprobs"]), truth.values)
    assert np.array_equal(array(answer["opd"]["log_tail"]), truth.log_tail)
    assert np.array_equal(array(answer["opd"]["sampled"]), truth.sampled)
    assert answer["prompt_logprobs"] is None


async def test_padding_scores_minus_infinity_and_its_mass_is_in_the_tail(door: Any) -> None:
    caller, ids = await door(), [11, 2, 83, 4]
    padded = {"prompt_logprob_token_ids": [[5, -1, 0], [-1, -1, -1], [0, 1]]}
    answer = await caller.ok("/inference/v1/generate", generation(ids, **padded) | {"opd": {"log_tail": True}})
    values = array(answer["prompt_token_id_logprobs"])
    full = (await caller.truth(ids, PayloadSpec.full())).logits.astype(np.float64)
    log_probs = full - np.logaddexp.reduce(full, axis=1, keepdims=True)
    wanted = [[log_probs[0, 5], -np.inf, log_probs[0, 0]], [-np.inf] * 3, [log_probs[2, 0], log_probs[2, 1], -np.inf]]
    assert np.allclose(values, np.array(wanted), atol=1e-5)
    tail = np.log1p(-np.exp(values.astype(np.float64)).sum(1))
    assert np.allclose(array(answer["opd"]["log_tail"]), tail, atol=1e-5)


async def test_a_request_without_a_model_is_for_the_only_teacher(door: Any, sequences: Any) -> None:
    caller = await door()
    body = completion(sequences[0])
    del body["model"]
    assert (await caller.ok("/v1/completions", body))["model"] == "t"
    assert (await caller.post("/v1/completions", completion(sequences[0], model="u"))).status_code == 404
    two = await door({"a": "numpy", "b": "numpy"})
    assert "model" in await two.refused("/v1/completions", body)
    assert (await two.ok("/v1/completions?model=b", body))["model"] == "b"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 16}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"prompt_logprobs": None}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 98}, "k is 98"),
        ({"prompt": "two words"}, "prompt 0"),
        ({"prompt": [["two"]]}, "prompt 0"),
        ({"prompt": [[1, 2], [3]]}, "prompt 1"),
        ({"prompt": [[1, 97]]}, "token id 97"),
        ({"prompt": [[1, -2]]}, "-2"),
        ({"prompt": [[1, 2.0]]}, "prompt 0"),
        ({"prompt": [[1, True]]}, "prompt 0"),
        ({"prompt": [[1, 10**400]]}, "prompt 0"),
        ({"prompt": [[1, [2]]]}, "prompt 0"),
        ({"prompt": []}, "prompt 0"),
        ({"echo": True}, "echo"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n is 2"),
        ({"logprobs": 5}, "logprobs"),
        ({"prompt_embeds": "aaaa"}, "prompt_embeds"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": 2.0, "opd": {"temperature": 3.0}}, "temperature"),
        ({"opd": {"tail": True}}, "opd"),
        ({"opd": {"log_tail": 1}}, "opd"),
        ({"opd": {"expected_weights_hash": "0" * 64}}, "weights"),
        ({"model": 5}, "model"),
        ({"request_id": "x" * 129}, "request_id"),
    ],
)
async def test_completions_refuse_what_they_cannot_give_exactly(door: Any, fields: Any, name: str) -> None:
    caller = await door()
    assert name in await caller.refused("/v1/completions", completion([[1, 2, 3]]) | fields)
    await caller.grpc.settled()


@pytest.mark.parametrize(
    ("sampling", "more", "name"),
    [
        ({}, {}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt_logprob_token_ids": [[1], [2]]}, {}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt_logprob_start": 1}, {}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [[1]]}, {}, "1 rows"),
        ({"prompt_logprob_token_ids": [[1, 1], [2, 3]]}, {}, "repeats"),
        ({"prompt_logprob_token_ids": [[1], [97]]}, {}, "97"),
        ({"prompt_logprob_token_ids": [[1], [-2]]}, {}, "-2"),
        ({"prompt_logprob_token_ids": [[], []]}, {}, "names no id"),
        ({"prompt_logprob_token_ids": [1, 2]}, {}, "rows"),
        ({"prompt_logprob_token_ids": [[1], ["2"]]}, {}, "token ids"),
        ({"prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 2}, {}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": [[1]], "prompt_logprob_start": -1}, {}, "prompt_logprob_start"),
        ({"prompt_logprobs": 1}, {"features": {"mm_hashes": {}}}, "features"),
        ({"prompt_logprobs": 1}, {"content_parts": [{}]}, "content_parts"),
        ({"prompt_logprobs": 1}, {"output_mode": "text"}, "output_mode"),
        ({"prompt_logprobs": 1}, {"stream": True}, "stream"),
        ({"prompt_logprobs": 1}, {"sampling_params": None}, "sampling_params"),
        ({"prompt_logprobs": 1}, {"token_ids": [[1, 2]]}, "token_ids"),
    ],
)
async def test_generate_refuses_what_it_cannot_give_exactly(door: Any, sampling: Any, more: Any, name: str) -> None:
    caller = await door()
    assert name in await caller.refused("/inference/v1/generate", generation([1, 2, 3], **sampling) | more)


async def test_no_number_is_an_infinity_where_a_log_prob_is_one(door: Any, numpy_engine: Any) -> None:
    def certain(model: str) -> Any:
        engine = numpy_engine(model)
        whole = engine._one

        def one(entry: Any) -> Any:
            scores = whole(entry)
            if entry.ranks:  # not in the self-test
                scores.sampled[0] = scores.values[0, -1] = -np.inf
            return scores

        engine._one = one
        return engine

    caller = await door(make=certain)
    answer = await caller.post("/v1/completions", completion([[1, 2, 3]]))
    assert "Infinity" not in answer.text and "-inf" not in answer.text
    assert answer.json()["choices"][0]["prompt_logprobs"][1]["2"]["logprob"] == -9999.0
