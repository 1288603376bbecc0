"""However a call over HTTP ends, what it held is freed at once, not by a garbage collection."""

import gc
from typing import Any

import numpy as np
import pytest

from opd.wire.types import ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from teacher_server.http.call import BodyCall
from teacher_server.http.question import Question

HELD = (pb.ScoreRequest, ScoreItem, Scores, BodyCall, Question, np.ndarray)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [[1, 2, 3]] * 9, "max_tokens": 1, "prompt_logprobs": 4}, 200),
        ("/v1/completions", {"prompt": [[1, 2, 97]], "max_tokens": 1, "prompt_logprobs": 4}, 400),
        (
            "/inference/v1/generate",
            {
                "token_ids": [1, 2, 3],
                "sampling_params": {"max_tokens": 1, "prompt_logprob_token_ids": [[1, -1], [2, 3]]},
            },
            200,
        ),
        (
            "/generate",
            {
                "input_ids": [1, 2, 3],
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "token_ids_logprob": [4, 5],
            },
            200,
        ),
    ],
)
async def test_what_a_call_held_is_freed_without_a_collection(door: Any, path: str, body: Any, status: int) -> None:
    caller = await door()
    assert (await caller.post(path, body)).status_code == status  # imports what is imported late
    gc.collect()
    gc.freeze()  # what was there before is looked through in no later test either
    gc.disable()
    try:
        for _ in range(3):
            assert (await caller.post(path, body)).status_code == status
        await caller.grpc.settled()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [type(one).__name__ for one in gc.garbage if isinstance(one, HELD)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
