"""The requests that trainers send, field by field from their sources, and what each reads of the answer.

Each test names the file and the lines that it follows, and reads no more and no less of the answer than they do.
"""

import math
from typing import Any

import numpy as np

from opd.wire.types import PayloadSpec

SEQUENCE, PROMPT = [11, 2, 83, 4, 5], 2


async def test_trl_s_server_client(door: Any) -> None:
    """TRL 1.16.0, trl/generation/vllm_client.py: 253 (the model), 684-690 (request), 705-718 (answer)."""
    caller = await door()
    model = (await caller.get("/v1/models")).json()["data"][0]["id"]
    sequences = [SEQUENCE, [7, 6, 5]]
    request = {"model": model, "prompt": sequences, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 3}
    answer = await caller.ok("/v1/completions", request)
    for ids, choice in zip(sequences, answer["choices"], strict=True):
        truth = await caller.truth(ids, PayloadSpec.topk(3, "f32"))
        for position in range(PROMPT, len(choice["prompt_logprobs"])):
            row = position - 1
            entries = choice["prompt_logprobs"][position]
            top = sorted(entries.items(), key=lambda item: item[1]["rank"])[:3]
            assert [int(id_) for id_, _ in top] == truth.ids[row].tolist()
            assert np.array_equal(np.float32([one["logprob"] for _, one in top]), truth.values[row])
            assert np.float32(entries[str(ids[position])]["logprob"]) == truth.sampled[row]


async def test_trl_s_asynchronous_trainer(door: Any) -> None:
    """TRL 1.16.0, trl/experimental/async_distillation/async_rollout_worker.py: 172-184 (answer), 613-631 (request)."""
    caller = await door()
    request = {"model": "t", "prompt": SEQUENCE, "max_tokens": 1, "temperature": 0.9, "prompt_logprobs": 2}
    entries = (await caller.ok("/v1/completions", request))["choices"][0]["prompt_logprobs"]
    truth = await caller.truth(SEQUENCE, PayloadSpec.topk(2, "f32"), temperature=0.9)
    for row, entry in enumerate(entries[1:]):
        items = sorted(entry.items(), key=lambda item: item[1]["rank"])
        assert not any(math.isnan(one["logprob"]) for _, one in items)
        assert [int(id_) for id_, _ in items][:2] == truth.ids[row].tolist()
        assert str(SEQUENCE[row + 1]) in entry


async def test_prime_rl_s_prefill(door: Any) -> None:
    """prime-rl (August 2026), src/prime_rl/utils/client.py: 479-513; the first entry of a position is its token."""
    caller = await door()
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    for path in ("/inference/v1/generate", "/api/v1/generate"):
        answer = await caller.ok(path, {"model": "t", "token_ids": SEQUENCE, "sampling_params": sampling})
        own = [0.0 if entry is None else next(iter(entry.values()))["logprob"] for entry in answer["prompt_logprobs"]]
        truth = await caller.truth(SEQUENCE, PayloadSpec.sampled())
        assert own[0] == 0.0 and np.array_equal(np.float32(own[1:]), truth.sampled)


async def test_slime_s_reward(door: Any) -> None:
    """slime (August 2026), slime/rollout/on_policy_distillation.py: 26-36 (request), post_process_rewards (answer)."""
    caller = await door()
    request = {
        "input_ids": SEQUENCE,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await caller.ok("/generate", request)
    found = [item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]][-(len(SEQUENCE) - PROMPT) :]
    truth = await caller.truth(SEQUENCE, PayloadSpec.sampled())
    assert np.array_equal(np.float32(found), truth.sampled[PROMPT - 1 :])


async def test_miles_s_reward_with_ids_by_position(door: Any) -> None:
    """miles (August 2026), miles/rollout/on_policy_distillation.py: _score_payload, _per_position_ids (request)."""
    caller = await door()
    student = [[5, 7], [9, 11], [4, 8]]
    request = {
        "input_ids": SEQUENCE,
        "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob_positions": [[] for _ in range(PROMPT)] + student,
    }
    meta = (await caller.ok("/generate", request))["meta_info"]
    truth = await caller.truth(SEQUENCE, PayloadSpec.gather(2, "f32"), gather=[[0, 1]] * (PROMPT - 1) + student)
    for row, entries in enumerate(meta["input_token_ids_logprobs"][1:][-len(student) :]):
        found = {int(entry[1]): float(entry[0]) for entry in entries}
        assert list(found) == student[row]
        assert np.array_equal(np.float32(list(found.values())), truth.values[PROMPT - 1 + row])
    own = meta["input_token_logprobs"][1:][-len(student) :]
    assert np.array_equal(np.float32([item[0] for item in own]), truth.sampled[PROMPT - 1 :])


async def test_a_scorer_that_compares_the_ids_it_gets_back(door: Any) -> None:
    """vLLM 0.33.0, vllm/entrypoints/openai/completion/protocol.py: 690; token_in_token_out/protocol.py: 607."""
    caller = await door()
    request = {"model": "t", "prompt": SEQUENCE, "temperature": 0, "max_tokens": 1, "prompt_logprobs": 1}
    answer = await caller.ok("/v1/completions", request | {"return_token_ids": True})
    assert answer["choices"][0]["prompt_token_ids"] == SEQUENCE
    body = {"token_ids": SEQUENCE, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    assert (await caller.ok("/inference/v1/generate", body | {"return_token_ids": True}))[
        "prompt_token_ids"
    ] == SEQUENCE
