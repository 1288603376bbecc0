"""Tiny models of several families with a tokenizer, a plain reference, the engines, fakes of SGLang and vLLM."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_engine_servers import ROWS, VOCABULARY, FakeServer, FakeSglang, FakeVllm
from ports import held_port
from sglang_server import SglangServer

from opd.wire.types import PayloadSpec, ScoreItem
from teacher_server.engines.base import Engine, EngineItem

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
    pytest.param("vllm-server-protocol", id="vllm-server-protocol"),
    pytest.param("sglang", id="sglang", marks=pytest.mark.engine),
    pytest.param("vllm-pooling", id="vllm-pooling", marks=pytest.mark.engine),
    pytest.param("vllm-generate", id="vllm-generate", marks=pytest.mark.engine),
]


def _open(name: str, folder: Path, server: "FakeServer | SglangServer | None") -> Engine:
    from teacher_server.engines import ENGINES

    if server is not None:
        if name.startswith("vllm"):
            return ENGINES.load("vllm_server")(str(folder), url=server.url, max_k=VOCABULARY, dtype="float32")
        return ENGINES.load("sglang")(str(folder), url=server.url, max_k=VOCABULARY)

    if name.startswith("transformers"):
        cls = ENGINES.load("transformers")
        return cls(str(folder), max_batch_tokens=64, logit_bytes=1 << 16, deterministic=name.endswith("deterministic"))
    if name.startswith("vllm"):
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM is not installed here; `make engines` runs this in an environment of its own")
        cls = ENGINES.load("vllm")
        return cls(str(folder), runner=name.partition("-")[2], max_batch_tokens=64, max_num_seqs=16, max_k=VOCABULARY)
    raise AssertionError(name)


@pytest.fixture(scope="session", params=_ENGINES)
def engine(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Engine]:
    """Each engine in turn, on `model_folder`."""
    server = _server(request.param, model_folder)
    try:
        opened = _open(request.param, model_folder, server)
        yield opened
        opened.close()
    finally:
        if server is not None:
            server.close()


def _server(name: str, folder: Path) -> "FakeServer | SglangServer | None":
    if name.endswith("-protocol"):
        return FakeSglang(folder) if name.startswith("sglang") else FakeVllm(folder)
    if name != "sglang":
        return None
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed here; `make sglang` runs this in an environment of its own")
    server = SglangServer(folder, held_port())
    try:
        server.wait()
    except BaseException:
        server.close()
        raise
    return server


@pytest.fixture
def sglang_server(make_model: Callable[..., Path]) -> Iterator[FakeSglang]:
    """A fake SGLang server on the suite's Qwen3 model."""
    server = FakeSglang(make_model("qwen3"))
    yield server
    server.close()
