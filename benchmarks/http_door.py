"""The HTTP door beside gRPC: tokens per second as a ratio, and bytes per token, at K = 64.

    python benchmarks/http_door.py               # about three minutes on two cores
    python benchmarks/http_door.py --quick

Each route scores the same sequences as the gRPC payload that answers the same question, in turn within a round, against
one server process. Two servers: an engine that answers at once, so that only the service costs anything, and a small
model of Qwen3's architecture with random weights. The client takes answers apart as far as a trainer must: arrays of
log-probs and ids. Medians of rounds; bytes are those of the bodies, request and answer.
"""

import argparse
import asyncio
import base64
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests

from opd.wire.bounds import RequestBounds
from opd.wire.channel import open_channel
from opd.wire.decoder import ScoreStreamDecoder
from opd.wire.request import build_score_request
from opd.wire.types import PayloadSpec, ScoreItem
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc
from support.models import SMALL, save_model
from support.server import CONSTANT_ENGINE, running_server

K = 64
SESSION = requests.Session()
THREADS = ThreadPoolExecutor(8)


def make_items(count: int, vocab: int, tokens: int) -> list[ScoreItem]:
    """Sequences of which every token behind the first is scored; their tokens are not among the ids to score.

    The constant engine gives all listed ids the same numbers, so one of them that is also the token would be found out.
    """
    rng = np.random.default_rng(0)
    rows, half = tokens - 1, vocab // 2
    return [
        ScoreItem(
            rng.integers(half, vocab, tokens).astype(np.uint32),
            1,
            (rng.integers(0, half // K, (rows, K)) + np.arange(K) * (half // K)).astype(np.uint32),
        )
        for _ in range(count)
    ]


def over_grpc(address: str, items: list[ScoreItem], spec: PayloadSpec) -> tuple[float, int]:
    """Seconds, and bytes in both directions."""
    if spec.k == 0 or spec.kind.value == "topk":
        items = [ScoreItem(item.token_ids, 1) for item in items]

    async def run() -> tuple[float, int]:
        async with open_channel(address) as channel:
            stub = teacher_pb2_grpc.TeacherServiceStub(channel)
            info = (await stub.Describe(pb.DescribeRequest(teacher="t"))).teachers[0]
            request = build_score_request(items, spec, teacher="t", request_id="r", accept_batches=True)
            decoder, size = ScoreStreamDecoder(items, spec, RequestBounds.from_info(info)), request.ByteSize()
            started = time.perf_counter()
            async for message in stub.Score(request):
                size += message.ByteSize()
                decoder.feed(message)
            decoder.finish()
            return time.perf_counter() - started, size

    return asyncio.run(run())


def post(url: str, body: dict[str, Any], read: Callable[[Any], Any]) -> tuple[float, int]:
    """Seconds, with the making of the body and the reading of the answer, and bytes in both directions."""
    started = time.perf_counter()
    data = json.dumps(body).encode()
    answer = SESSION.post(url, data=data)
    if answer.status_code != 200:
        raise SystemExit(answer.text)
    read(answer.json())
    return time.perf_counter() - started, len(data) + len(answer.content)


def completions(url: str, items: list[ScoreItem]) -> tuple[float, int]:
    """Route A: top k."""
    prompts = [item.token_ids.tolist() for item in items]
    body = {"model": "t", "prompt": prompts, "max_tokens": 1, "prompt_logprobs": K}

    def read(answer: Any) -> None:
        for choice in answer["choices"]:
            for entry in choice["prompt_logprobs"][1:]:
                np.array([one["logprob"] for one in entry.values()], np.float32)
                np.array([int(one) for one in entry], np.uint32)

    return post(f"{url}/v1/completions", body, read)


def chosen(url: str, items: list[ScoreItem]) -> tuple[float, int]:
    """Route C: the caller's ids, a request for each sequence, all at the same time."""

    def ask(item: ScoreItem) -> int:
        gather = item.gather_ids.tolist() if item.gather_ids is not None else []
        sampling = {"max_tokens": 1, "prompt_logprob_token_ids": gather}
        body = {"model": "t", "token_ids": item.token_ids.tolist(), "sampling_params": sampling}
        return post(
            f"{url}/inference/v1/generate",
            body,
            lambda answer: np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"]))),
        )[1]

    started = time.perf_counter()
    size = sum(THREADS.map(ask, items))
    return time.perf_counter() - started, size


def in_sglangs_form(items: list[ScoreItem]) -> dict[str, Any]:
    """What every request of route D has."""
    return {
        "model": "t",
        "input_ids": [item.token_ids.tolist() for item in items],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def flat(url: str, items: list[ScoreItem]) -> tuple[float, int]:
    """Route D: top k as flat arrays in base64."""
    body = in_sglangs_form(items) | {
        "top_logprobs_num": K,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
    }

    def read(answer: Any) -> None:
        for one in answer:
            np.frombuffer(base64.b64decode(one["meta_info"]["input_top_logprobs_val_flat_b64"]), "<f4")
            np.frombuffer(base64.b64decode(one["meta_info"]["input_top_logprobs_idx_flat_b64"]), "<i4")

    return post(f"{url}/generate", body, read)


def nested(url: str, items: list[ScoreItem]) -> tuple[float, int]:
    """Route D: the caller's ids at each position, in lists."""
    positions = [[[], *(item.gather_ids.tolist() if item.gather_ids is not None else [])] for item in items]
    body = in_sglangs_form(items) | {"token_ids_logprob_positions": positions}

    def read(answer: Any) -> None:
        for one in answer:
            rows = one["meta_info"]["input_token_ids_logprobs"][1:]
            np.array([[entry[0] for entry in row] for row in rows], np.float32)

    return post(f"{url}/generate", body, read)


ROUTES = {
    "A /v1/completions": (completions, PayloadSpec.topk(K, "f32")),
    "C /inference/v1/generate, chosen ids": (chosen, PayloadSpec.gather(K, "f32")),
    "D /generate, flat base64": (flat, PayloadSpec.topk(K, "f32")),
    "D /generate, ids by position": (nested, PayloadSpec.gather(K, "f32")),
}


def compare(words: list[str], items: list[ScoreItem], rounds: int) -> None:
    """Print a line for each route."""
    address, url = words[0], f"http://{words[0].partition(':')[0]}:{words[3]}"
    tokens = sum(len(item.token_ids) - 1 for item in items)
    for name, (ask, spec) in ROUTES.items():
        pairs = []
        for _ in range(rounds + 1):  # the first warms both sides up
            pairs.append((over_grpc(address, items, spec), ask(url, items)))
        pairs = pairs[1:]
        grpc_rate = tokens / statistics.median(own[0] for own, _ in pairs)
        rate = tokens / statistics.median(other[0] for _, other in pairs)
        ratio = statistics.median(own[0] / other[0] for own, other in pairs)
        sizes = pairs[0][0][1] / tokens, pairs[0][1][1] / tokens
        print(
            f"| {name} | {grpc_rate:,.0f} | {rate:,.0f} | {ratio:.2f} | {sizes[0]:.0f} | {sizes[1]:,.0f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 2 if parser.parse_args().quick else 7
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder) / "model", SMALL | {"num_hidden_layers": 6})
        engines = {
            "an engine that answers at once": (CONSTANT_ENGINE, 151_936),
            "a model": (("--model", f"t={folder}/model", "--max-k", "64"), SMALL["vocab_size"]),
        }
        for name, (flags, vocab) in engines.items():
            more = ("--http-port", "0", "--metrics-port", "-1", "--log-level", "error")
            with running_server(Path(folder) / f"port {vocab}", *flags, *more) as (_, words):
                print(f"\n{name}\n\n| route | gRPC tokens/s | HTTP | ratio | gRPC bytes a token | HTTP |")
                print("| --- | ---: | ---: | ---: | ---: | ---: |")
                compare(words, make_items(8, vocab, 257), rounds)


if __name__ == "__main__":
    main()
