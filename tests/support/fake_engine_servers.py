"""Servers with the scoring routes of SGLang 0.5.23 and vLLM 0.33, which answer with a real model's numbers."""

import base64
import io
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 260
LIMIT = 500  # of the servers, whose inputs must be shorter
ROWS = 320  # of the head: ids from 260 on belong to no token, and their rows are as large as the others


class FakeServer:
    """An HTTP server that answers with a real model's numbers.

    Attributes:
        requests: bodies of requests for scores in order of arrival.
        spoil: changes an answer with scores before it is sent.
        status: (path, code) answers that path with an HTTP error.
        key: the bearer token that it wants.
    """

    def __init__(self, folder: Path) -> None:
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.spoil: Callable[[dict[str, Any]], None] = lambda meta: None
        self.status: tuple[str, int] | None = None
        self.key: str | None = None
        self.load(folder)
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any] | None) -> None:
                fake.calls.append(self.path)
                code, found = 200, {}
                if fake.key is not None and self.headers["Authorization"] != f"Bearer {fake.key}":
                    code, found = 401, {"error": "Unauthorized"}
                elif fake.status is not None and fake.status[0] == self.path:
                    code, found = fake.status[1], {"error": {"message": "told to fail"}}
                else:
                    code, found = fake.answer(self.path, body)
                # It writes NaN and infinity as null.
                raw = json.dumps(json.loads(json.dumps(found), parse_constant=lambda _: None)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def load(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def log_probs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():  # the sampling temperature does not reach them
            return self._model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        raise NotImplementedError


class FakeSglang(FakeServer):
    """A /generate server with the fields of SGLang 0.5.23.

    Attributes:
        dead: an id that is out of range reached it: the real server would have ended.
        fails: the next loads that say that they failed, with the new weights in under the version before.
        unflushed: whether loads fail like this because rows of a client that hung up are still running.
        saves_memory: whether it was started with --enable-memory-saver.
    """

    def __init__(self, folder: Path) -> None:
        self.dead = False
        self.fails, self.unflushed, self.saves_memory = 0, False, True
        self.weight_version = "default"
        super().__init__(folder)

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if path == "/model_info":
            return 200, {"model_type": "qwen3", "is_generation": True, "weight_version": self.weight_version}
        if path == "/server_info":
            info = {"version": "0.5.23", "dtype": "float32", "max_req_input_len": LIMIT, "context_length": None}
            return 200, info | {"enable_memory_saver": self.saves_memory}
        assert body is not None
        if path == "/update_weights_from_disk":
            self.load(Path(body["model_path"]))
            if self.fails:
                self.fails -= 1
                return 400, {"success": False, "message": "Failed to update weights: no space."}
            if self.unflushed:
                return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed."}
            self.weight_version = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        if path.startswith("/flush_cache"):
            self.unflushed = False
            return 200, "Cache flushed."
        return self._generate(body) if path == "/generate" else (200, {})

    def _generate(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        ids, start = body["input_ids"], body["logprob_start_len"]
        if len(ids) >= LIMIT:
            return 400, {"error": {"message": f"Input length ({len(ids)} tokens) exceeds the maximum allowed length"}}
        assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 0 and start >= 0
        self.dead |= not all(0 <= token < ROWS for token in ids)
        logp = self.log_probs(ids)
        # The first entry is null; entry i belongs to input position start + i. The last id of the head is told as 0.
        rows = logp[start:-1]
        told = [token if token < logp.shape[-1] - 1 else 0 for token in ids]
        own: list[Any] = [[None, told[start], None]]
        own += [
            [float(row[token]), name, None]
            for row, token, name in zip(rows, ids[start + 1 :], told[start + 1 :], strict=True)
        ]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(ids),
            "weight_version": self.weight_version,
            "input_token_logprobs": own,
            "output_token_logprobs": [],
            "output_token_logprobs_length": 0,
        }
        if k := body.get("top_logprobs_num", 0):
            assert body["return_flat_raw_top_logprobs"] and body["return_flat_raw_top_logprobs_b64"]
            values, listed = rows.topk(k, -1)
            prefix = "input_top_logprobs_"
            meta[prefix + "val_flat_b64"] = base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()
            meta[prefix + "idx_flat_b64"] = base64.b64encode(listed.numpy().astype("<i4").tobytes()).decode()
            meta[prefix + "val_flat_b64_dtype"], meta[prefix + "idx_flat_b64_dtype"] = "float32", "int32"
            meta[prefix + "shape"], meta[prefix + "null_prefix"] = [len(rows), k], 1
            meta["output_top_logprobs"] = []
        if wanted := body.get("token_ids_logprob"):
            self.dead |= not all(0 <= token < ROWS for token in wanted)
            meta["input_token_ids_logprobs"] = [None]
            meta["input_token_ids_logprobs"] += [[[float(row[i]), i, None] for i in wanted] for row in rows]
        self.spoil(meta)
        return 200, {"text": "", "output_ids": [], "meta_info": meta}


class FakeVllm(FakeServer):
    """The routes of vLLM 0.33 (`vllm serve --enable-scale-out`) that score.

    Attributes:
        gathers: whether its model runner scores chosen ids.
        most: its --max-logprobs.
        models: the names that it serves.
    """

    def __init__(self, folder: Path) -> None:
        self.gathers, self.most, self.models = True, ROWS, ["served"]
        super().__init__(folder)

    def answer(self, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        if path == "/version":
            return 200, {"version": "0.33.0"}
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "max_model_len": LIMIT} for name in self.models]}
        if path != "/inference/v1/generate" or body is None:
            return 404, {"error": {"message": "Not Found"}}
        self.requests.append(body)
        asked, ids = body["sampling_params"], body["token_ids"]
        assert body["model"] in self.models and asked["max_tokens"] == 1
        if len(ids) >= LIMIT or asked.get("prompt_logprobs", 0) > self.most:
            return 400, {"error": {"message": "too many"}}
        logp, found = self.log_probs(ids), {"request_id": "1", "choices": []}
        if "prompt_logprobs" in asked:
            rows = zip(logp, ids[1:], strict=False)
            found["prompt_logprobs"] = [None, *(_listed(row, own, asked["prompt_logprobs"]) for row, own in rows)]
        else:
            table, start = np.array(asked["prompt_logprob_token_ids"]), asked["prompt_logprob_start"]
            if not self.gathers or table.max() >= ROWS or len(table) != len(ids) - 1 - start:
                return 400, {"error": {"message": "prompt_logprob_token_ids requires the V2 model runner"}}
            if any(len({*row}) < len(row) for row in ([i for i in row if i >= 0] for row in table.tolist())):
                return 400, {"error": {"message": "an id twice at a position"}}  # as a door of opd's refuses it
            values = np.take_along_axis(logp[start:-1].numpy(), np.maximum(table, 0), 1)
            raw = io.BytesIO()
            np.save(raw, np.where(table < 0, -np.inf, values).astype(np.float32))
            found["prompt_token_id_logprobs"] = base64.b64encode(raw.getvalue()).decode()
        self.spoil(found)
        return 200, found


def _listed(row: torch.Tensor, own: int, k: int) -> dict[str, dict[str, Any]]:
    """A position of vLLM's prompt log-probs: the token itself, then the k likeliest ids."""
    ids = [own, *(token for token in row.topk(k).indices.tolist() if token != own)]
    return {
        str(token): {"logprob": float(row[token]), "rank": 1 + int((row > row[token]).sum()), "decoded_token": None}
        for token in ids
    }
