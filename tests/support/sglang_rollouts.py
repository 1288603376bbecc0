"""A stand-in for an SGLang server that samples: its HTTP interface by the fields of SGLang 0.5.23, a real model behind.

/generate, /update_weights_from_disk, /update_weight_version, /flush_cache, /load_lora_adapter, /unload_lora_adapter,
/v1/models, /model_info and /server_info; tests/student/rollout/servers/test_sglang_server.py holds them against SGLang
itself. A seed draws as with --enable-deterministic-inference: a token follows from weights, ids, seed and position. New
weights wait for the rows under way, and rows for them; a new version reaches rows under way.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class SglangRollouts:
    """The server, on a port of its own.

    Args:
        folder: the model it is started on.
        port: to listen on; 0 for any.

    Attributes:
        asked: paths and bodies, in order.
        dies_after: rows after which it is gone without an answer; None: never.
        fails: the next loads that say that they failed, with the new weights in under the version before.
        unflushed: whether the next load finds rows of a client that hung up, and does not empty the cache.
        keys: keys of ordinary calls and of those that replace weights; None: any does.
        stale: whether loads change the version and not the weights.
        changes: whether the weights are replaced, as by another client, in the middle of the next row.
        went: set when it is gone.
        gate: rows wait until this is set; None: they do not.
        lie: sends its own answer to a row, given the connection and the true answer; None: the truth is sent.
        lied: set when it did.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.plain = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.version = "default"
        self.adapters: dict[str, Path] = {}
        self.asked: list[tuple[str, Any]] = []
        self.dies_after: int | None = None
        self.fails, self.stale, self.changes, self.gone, self.unflushed = 0, False, False, False, False
        self.keys: tuple[str, str] | None = None
        self.went = threading.Event()
        self.gate: threading.Event | None = None
        self.lie: Callable[[Any, Any], None] | None = None
        self.lied = threading.Event()
        self._lock = threading.RLock()  # a model runs one row at a time here
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                if not stand_in.lets(self.path, self.headers["Authorization"]):
                    status, found = 401, {"error": "Unauthorized"}
                else:
                    status, found = stand_in.answer(self.path, body)
                if status == 0:  # gone: no answer, and no other
                    self.close_connection = True
                    return
                if (
                    stand_in.lie is not None
                    and self.path == "/generate"
                    and body["sampling_params"]["temperature"] == 1
                ):
                    stand_in.lied.set()
                    stand_in.lie(self.connection, found)
                    self.close_connection = True
                    return
                # It writes NaN and infinity as null.
                raw = json.dumps(json.loads(json.dumps(found), parse_constant=lambda _: None)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass  # a client that gave up

        self._listener = Listener(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        self._thread = threading.Thread(target=self._listener.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def rows(self) -> int:
        """How many rows were asked of it."""
        return sum(path == "/generate" for path, _ in self.asked)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON; status 0 for a server that is gone."""
        if self.gone:
            return 0, None
        self.asked.append((path, body))
        if path == "/model_info":
            return 200, {"weight_version": self.version}
        if path == "/server_info":
            info = {"context_length": None, "max_req_input_len": self.longest, "enable_lora": True}
            return 200, info | {"version": "0.5.23", "enable_memory_saver": False}
        if path == "/v1/models":
            return 200, {"data": [{"id": "base"}, *({"id": name, "parent": "base"} for name in self.adapters)]}
        if path == "/generate" and self.gate is not None and not self.gate.wait(120):
            raise TimeoutError("the gate stayed shut")
        if path == "/update_weight_version":  # waits for no row
            self.version = str(body["new_version"])
            return 200, {"success": True, "new_version": self.version}
        if path.startswith("/flush_cache"):
            self.unflushed = False
            return 200, "Cache flushed."
        with self._lock:
            return getattr(self, f"_{path.strip('/')}")(body)

    @property
    def longest(self) -> int:
        """An input must be shorter."""
        return int(self.model.config.max_position_embeddings) - 6

    def lets(self, path: str, sent: str | None) -> bool:
        """Whether the key that came with a call is the one for it."""
        if self.keys is None:
            return True
        changes = path.startswith(("/update", "/flush", "/load", "/unload"))
        return sent == f"Bearer {self.keys[changes]}"

    def _update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        if not self.stale:
            files = sorted(Path(body["model_path"]).glob("*.safetensors"))
            if not files:
                return 400, {"success": False, "message": f"Failed to get weights iterator: {body['model_path']}."}
            found = {name: tensor for file in files for name, tensor in load_file(file).items()}
            self.model.load_state_dict(found, strict=False)
            if self.fails:
                self.fails -= 1
                return 400, {"success": False, "message": "Failed to update weights: no space."}
            if self.unflushed:
                return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed."}
        self.version = str(body["weight_version"])
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        self.adapters[body["lora_name"]] = Path(body["lora_path"])
        return 200, {"success": True}

    def _unload_lora_adapter(self, body: Any) -> tuple[int, Any]:
        del self.adapters[body["lora_name"]]
        return 200, {"success": True}

    def _generate(self, body: Any) -> tuple[int, Any]:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                self.gone = True
                self.went.set()
                return 0, None
        if adapter := body.get("lora_path"):
            from peft import PeftModel

            tuned = PeftModel.from_pretrained(self.model, self.adapters[adapter])
            try:
                return self._sampled(tuned, body)
            finally:
                tuned.unload()
        return self._sampled(self.model, body)

    @torch.no_grad()
    def _sampled(self, model: Any, body: Any) -> tuple[int, dict[str, Any]]:
        params, ids = body["sampling_params"], list(body["input_ids"])
        if len(ids) >= self.longest:
            return 400, {"error": {"message": f"Input length ({len(ids)} tokens) exceeds the maximum allowed length"}}
        level, top = params["temperature"], body.get("top_logprobs_num", 0)
        limit = min(params["max_new_tokens"], self.longest + 4 - len(ids))
        ends = set() if params.get("ignore_eos") else {*params["stop_token_ids"], self.model.config.eos_token_id}
        start, entries, tops, reason = len(ids), [], [], {"type": "length", "length": params["max_new_tokens"]}
        spans = [{"version": self.version, "start": 0, "end": 0}]
        for at in range(limit):
            logits = model(torch.tensor([ids])).logits[0, -1].float()
            for token, bias in params.get("logit_bias", {}).items():
                logits[int(token)] += bias
            logp = (logits / (level or 1.0)).log_softmax(-1)
            generator = torch.Generator().manual_seed(params["sampling_seed"] * 4096 + len(ids))
            drawn = torch.multinomial(logp.exp(), 1, generator=generator)
            token = int(logp.argmax()) if level == 0 else int(drawn)
            ids.append(token)
            entries.append([float(logp[token]), token, None])
            best = logp.topk(top)
            tops.append([[float(v), int(i), None] for v, i in zip(best.values, best.indices, strict=True)])
            if self.changes:
                self.changes, self.version = False, "another"
            if self.version != spans[-1]["version"]:
                spans.append({"version": self.version, "start": at, "end": at})
            spans[-1]["end"] = at + 1
            if token in ends:
                reason = {"type": "stop", "matched": token}
                break
        meta = {"finish_reason": reason, "weight_version": self.version, "weight_versions": spans}
        meta |= {"output_token_logprobs": entries} | ({"output_top_logprobs": tops} if top else {})
        return 200, {"output_ids": ids[start:], "meta_info": meta}
