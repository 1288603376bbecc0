"""Tiny models of several families with a tokenizer beside them, a plain reference, the engines, a fake SGLang."""

import base64
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ports import held_port
from sglang_server import SglangServer

from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.engines.base import Engine, EngineItem

VOCABULARY = 260
LIMIT = 500  # of the fake SGLang, whose inputs must be shorter
ROWS = 320  # of the head: ids from 260 on belong to no token, and their rows are as large as the others
_COMMON = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Large enough that attention and logits matter; the usual 0.02 gives an almost uniform distribution.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Family -> what makes it special. Gemma 2: soft-cap and sliding window; Granite and Cohere: logit scale;
# Falcon-H1: recurrent state beside attention; Mamba: no attention; Phi: a head with a bias; Phi-3: positions that are
# scaled otherwise beyond 32 tokens.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {},
    "llama": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},
    "gpt2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_neox": {"num_key_value_heads": 2},
    "phi3": {
        "sliding_window": None,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
        },
    },
    "mamba": {},
    "falcon_mamba": {},
    "falcon_h1": {
        "lm_head_multiplier": 0.5,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
    },
}


def _tokenizer() -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{i} plus {i * 7} is {i * 8}" for i in range(400)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
    )


def _save_model(family: str, folder: Path, seed: int, **changes: object) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = [7, 2]  # as chat models have it
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)  # type: ignore[attr-defined]
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model(family, seed=0, **config changes) -> folder; built once per session."""
    made: dict[object, Path] = {}

    def make(family: str = "qwen3", seed: int = 0, **changes: object) -> Path:
        key = (family, seed, *sorted(changes.items()))
        if key not in made:
            made[key] = _save_model(family, tmp_path_factory.mktemp(f"{family}-{seed}"), seed, **changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[Path, ScoreItem], torch.Tensor]:
    """Logits [T, V] f32 of the response positions over the tokenizer's ids, from the model's own unbatched forward."""
    from transformers import AutoModelForCausalLM

    loaded: dict[Path, torch.nn.Module] = {}

    def logits(folder: Path, item: ScoreItem) -> torch.Tensor:
        if folder not in loaded:
            # Plain attention: the fused one would drop Gemma 2's soft-cap on attention logits.
            loaded[folder] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            return loaded[folder](input_ids=ids).logits[0, item.prompt_length - 1 : -1, :VOCABULARY].float()

    return logits


@pytest.fixture(scope="session")
def make_item() -> Callable[..., ScoreItem]:
    """make_item(prompt, response, seed, k, prompt_seed): random ids; with k also k distinct ids per position."""

    def make(prompt: int, response: int, seed: int = 0, k: int = 0, prompt_seed: int | None = None) -> ScoreItem:
        draw = np.random.default_rng(seed)
        ids = draw.integers(3, VOCABULARY, prompt + response, dtype=np.uint32)
        if prompt_seed is not None:
            ids[:prompt] = np.random.default_rng(prompt_seed).integers(3, VOCABULARY, prompt, dtype=np.uint32)
        gather = None
        if k:
            gather = np.stack([draw.permutation(VOCABULARY)[:k] for _ in range(response)]).astype(np.uint32)
        return ScoreItem(ids, prompt, gather)

    return make


@pytest.fixture(scope="session")
def entry() -> Callable[..., EngineItem]:
    """entry(item, spec, temperature=1.0, cancelled=None) -> EngineItem."""

    def make(
        item: ScoreItem, spec: PayloadSpec, temperature: float = 1.0, cancelled: Callable[[], bool] | None = None
    ) -> EngineItem:
        return EngineItem(item, spec, temperature, *([] if cancelled is None else [cancelled]))

    return make


@pytest.fixture(scope="session")
def model_folder(make_model: Callable[..., Path]) -> Path:
    """The model that the conformance suite runs."""
    return make_model("qwen3")


# The engines of the conformance suite, each computing at most 64 tokens at a time.
_ENGINES = [
    pytest.param("transformers", id="transformers"),
    pytest.param("transformers-deterministic", id="transformers-deterministic"),
    pytest.param("sglang-protocol", id="sglang-protocol"),
    pytest.param("sglang", id="sglang", marks=pytest.mark.engine),
    pytest.param("vllm-pooling", id="vllm-pooling", marks=pytest.mark.engine),
    pytest.param("vllm-generate", id="vllm-generate", marks=pytest.mark.engine),
]


def _open(name: str, folder: Path, server: "FakeSglang | SglangServer | None") -> Engine:
    from teacher_server.engines import ENGINES

    if name.startswith("transformers"):
        cls = ENGINES.load("transformers")
        return cls(str(folder), max_batch_tokens=64, logit_bytes=1 << 16, deterministic=name.endswith("deterministic"))
    if name.startswith("vllm"):
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed here; `make engines` runs this in an environment of its own")
        cls = ENGINES.load("vllm")
        return cls(str(folder), runner=name.partition("-")[2], max_batch_tokens=64, max_num_seqs=16, max_k=VOCABULARY)
    assert server is not None
    return ENGINES.load("sglang")(str(folder), url=server.url, max_k=VOCABULARY)


@pytest.fixture(scope="session", params=_ENGINES)
def engine(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Engine]:
    """Each engine in turn, on `model_folder`."""
    server = _sglang(request.param, model_folder) if request.param.startswith("sglang") else None
    try:
        opened = _open(request.param, model_folder, server)
        yield opened
        opened.close()
    finally:
        if server is not None:
            server.close()


def _sglang(name: str, folder: Path) -> "FakeSglang | SglangServer":
    if name == "sglang-protocol":
        return FakeSglang(folder)
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here; `make sglang` runs this in an environment of its own")
    server = SglangServer(folder, held_port())
    try:
        server.wait()
    except BaseException:
        server.close()
        raise
    return server


class FakeSglang:
    """A /generate server with the fields of SGLang 0.5.23, answering with a real model's numbers.

    Attributes:
        dead: an id that is out of range reached it: the real server would have ended.
        requests: bodies of /generate in order of arrival.
        spoil: changes `meta_info` before it is sent.
        status: (path, code) answers that path with an HTTP error.
        fails: the next loads that say that they failed, with the new weights in under the version before.
        unflushed: whether loads fail like this because rows of a client that hung up are still running.
        saves_memory: whether it was started with --enable-memory-saver.
    """

    def __init__(self, folder: Path) -> None:
        self.dead = False
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.spoil: Callable[[dict[str, Any]], None] = lambda meta: None
        self.status: tuple[str, int] | None = None
        self.key: str | None = None
        self.fails, self.unflushed, self.saves_memory = 0, False, True
        self.weight_version = "default"
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
        with torch.no_grad():  # the sampling temperature does not reach input log-probs
            logp = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
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


@pytest.fixture
def sglang_server(make_model: Callable[..., Path]) -> Iterator[FakeSglang]:
    """A fake SGLang server on the suite's Qwen3 model."""
    server = FakeSglang(make_model("qwen3"))
    yield server
    server.close()
