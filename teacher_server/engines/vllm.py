"""vLLM as an engine in this process, with either of its runners.

`runner="pooling"` (the default) takes hidden states from vLLM and applies our own head to them: exact for every payload
at any temperature. `runner="generate"` takes vLLM's own prompt log-probs: there is no second copy of the head, but
temperature is 1, k is limited by an option, and gather needs `prompt_logprob_token_ids` of vLLM's V2 model runner
(found out by trying). docs/engines.md describes the traps that this file avoids.
"""

import math
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opd.engine_versions import installed_vllm, note_version
from opd.errors import ConfigError, UnavailableError, one_line
from opd.extras import require
from opd.heads import OutputHead
from opd.pretrained import read_config
from opd.wire.fingerprint import weights_hash
from opd.wire.types import Head, PayloadKind, Scores
from teacher_server.engines.base import EngineInfo, EngineItem, Exchange, check_batch, require_awake
from teacher_server.engines.checkpoint import (
    Header,
    HeadLayout,
    check_same_tensors,
    check_unchanged,
    load_head,
    read_header,
)
from teacher_server.engines.head import DTYPE_NAMES, export, identity_of
from teacher_server.engines.loading import (
    check_same_architecture,
    counted_ids,
    load_stop_token_ids,
    load_tokenizer_identity,
    pick_device,
    pick_dtype,
    resolve_folder,
)
from teacher_server.engines.project import finish, start
from teacher_server.engines.vllm_generate import (
    WORKER_EXTENSION,
    can_gather,
    check_cut,
    cut_vocabulary,
    generate_request,
    read_scores,
)

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """A set of weights that is in use or ready to be."""

    folder: Path
    header: Header
    head: OutputHead | None
    info: EngineInfo


class VllmEngine:
    """VLLM in this process: sampled, topk, and gather and hidden where this vLLM has them.

    Runs one teacher with vLLM.

    Args:
        model: folder written by save_pretrained (with its tokenizer), or a hub id.
        runner: "pooling" or "generate"; see the module.
        device: "auto", "cuda" or "cpu"; vLLM chooses the device itself.
        dtype: "f32", "bf16", "f16", or "auto": that of the checkpoint on accelerators, f32 on the CPU.
        deterministic: must be False, because vLLM forms its own batches.
        max_batch_tokens: most tokens in a forward pass (vLLM's max_num_batched_tokens): bounds the [tokens, V] logits
            that the generate runner allocates outside vLLM's memory profile.
        logit_bytes: bytes of logits that may exist at once with the pooling runner.
        max_k: largest k with the generate runner.
        revision: revision of a hub id.
        trust_remote_code: run model code from the folder or the hub.
        tensor_parallel_size: number of GPUs that the model is spread over.
        gpu_memory_utilization: share of the GPU's memory, or of a CPU machine's, that vLLM may take. None is 0.85 on a
            GPU, which leaves room for the head and `logit_bytes`, and 0.3 on a CPU.
        vllm_options: further arguments of `vllm.LLM`.

    Raises:
        ConfigError: if vLLM is not installed, cannot load the model, or an option is not valid here.
    """

    def __init__(
        self,
        model: str,
        *,
        runner: str = "pooling",
        device: str = "auto",
        dtype: str = "auto",
        deterministic: bool = False,
        max_batch_tokens: int = 8192,
        logit_bytes: int = 256 << 20,
        max_k: int = 256,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        **vllm_options: Any,
    ) -> None:
        _check_options(runner, device, deterministic)
        self._device = pick_device(device)
        self._lock = threading.RLock()
        self._asleep = self._closed = False
        self._logit_bytes = logit_bytes
        self._trust = trust_remote_code
        self._folder = resolve_folder(model, revision, with_code=trust_remote_code)
        self._config = read_config(self._folder, trust_remote_code=trust_remote_code)
        self._tokenizer = load_tokenizer_identity(self._folder, trust_remote_code=trust_remote_code)
        self._rows = int(self._config.get_text_config().vocab_size)
        vocabulary = counted_ids(self._tokenizer, self._rows)
        options: dict[str, Any] = {
            # vLLM's own "auto" would compute an f32 checkpoint in half precision.
            "dtype": _DTYPES[pick_dtype(dtype, self._device, self._config)],
            "max_num_batched_tokens": max_batch_tokens,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization or (0.3 if self._device.type == "cpu" else 0.85),
            "enable_sleep_mode": self._device.type == "cuda",
        }
        max_k = vocabulary if runner == "pooling" else min(max_k, vocabulary)
        if runner == "generate":
            # All rows, because `check_cut` reads every logit once; clients are limited to `max_k`.
            options |= {"max_logprobs": self._rows, "worker_extension_cls": WORKER_EXTENSION}
        # Before vLLM starts, which patches a class of transformers so that it can build no other model afterwards.
        self._layout = HeadLayout.of(self._config) if runner == "pooling" else None
        note_version("vLLM", installed_vllm(), "this server")
        self._llm = _start(self._folder, runner, self._device, options | vllm_options)
        self._engine: Any = self._llm.llm_engine
        model_config = self._engine.vllm_config.model_config
        self._dtype: torch.dtype = model_config.dtype
        self._header = read_header(self._folder)
        self._head: OutputHead | None = None
        if self._layout is not None:
            self._head = load_head(self._folder, self._layout, self._dtype, self._device, self._tokenizer)
        elif vocabulary < self._rows:
            cut_vocabulary(self._llm, vocabulary)
            check_cut(self._llm, vocabulary)
        self._info = self._describe(model, runner, vocabulary, max_k, int(model_config.max_model_len))

    def _describe(self, model: str, runner: str, vocabulary: int, max_k: int, max_tokens: int) -> EngineInfo:
        pooling = runner == "pooling"
        payloads = frozenset(PayloadKind)
        if not pooling:
            gather = {PayloadKind.GATHER} if can_gather(self._llm) else set()
            payloads = frozenset({PayloadKind.SAMPLED, PayloadKind.TOPK} | gather)
        return EngineInfo(
            engine=f"vllm {installed_vllm() or 'unknown'} ({runner})",
            model=model,
            weights_hash=weights_hash(self._folder),
            compute_dtype=DTYPE_NAMES[self._dtype],
            vocab_size=vocabulary,
            tokenizer=self._tokenizer,
            head=None if self._head is None else identity_of(self._head),
            payloads=payloads,
            supports_temperature=pooling,
            # The generate runner needs room for one token, which is discarded.
            max_sequence_tokens=max_tokens - (not pooling),
            max_k=max_k,
            padding_rows=self._rows - vocabulary,
            stop_token_ids=load_stop_token_ids(self._folder, self._config, self._tokenizer, vocabulary),
            spans=True,
        )

    @property
    def info(self) -> EngineInfo:
        """Identity and abilities; changes when weights are replaced."""
        return self._info

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        """Score a batch: one result per item, in order; None for an item that was cancelled.

        Cancellation is polled between vLLM's steps; a cancelled sequence is aborted inside vLLM.

        Raises:
            InvalidRequestError: if an item exceeds a limit of `info`.
            NonFiniteError: if the model produced NaN or infinity for an item.
            UnavailableError: if the engine sleeps or is closed.
        """
        check_batch(self._info, batch)
        out: list[Scores | None] = [None] * len(batch)
        with self._lock, torch.inference_mode():
            require_awake(self._info.model, asleep=self._asleep, closed=self._closed)
            if self._head is not None:
                self._run(batch, self._pooling_request, lambda row, found: self._project(row, found, batch, out))
            else:
                self._run(batch, generate_request, lambda row, found: self._read(row, found, batch, out))
        return out

    def head(self) -> Head:
        """The output head, for clients that take hidden states."""
        if self._head is None or self._info.head is None:
            raise UnavailableError(
                f"teacher {self._info.model} does not serve hidden states with runner generate; use runner pooling."
            )
        return export(self._head, self._info.head.hash)

    def memory_bytes(self) -> int:
        """Bytes of the weights in the compute dtype and of our copy of the head, without the key-value cache."""
        numbers = sum(math.prod(shape) for _, shape, _ in self._header.values())
        head = 0 if self._head is None else self._head.weight.nbytes
        return numbers * self._dtype.itemsize + head

    def prepare_weights(self, folder: Path) -> Exchange:
        """Check names, shapes and config of new weights and read their head; the exchange makes vLLM load the rest.

        If vLLM fails half-way, the weights in use are loaded again from the folder that they came from.

        Raises:
            ConfigError: if the folder cannot be read, or vLLM on a CPU would take only part of the weights.
            IncompatibleTeacherError: if its config, names or shapes differ.
        """
        folder = Path(folder)
        if self._device.type == "cpu":
            self._refuse_packed()
        if (folder / "config.json").is_file():
            check_same_architecture(self._config, read_config(folder, trust_remote_code=self._trust), folder)
        header = read_header(folder)
        check_same_tensors(self._header, header, folder)
        new_hash = weights_hash(folder)
        head = None
        if self._layout is not None:
            head = load_head(folder, self._layout, self._dtype, self._device, self._tokenizer)
        identity = None if head is None else identity_of(head)
        other = _Weights(folder, header, head, replace(self._info, weights_hash=new_hash, head=identity))
        known = True

        def exchange() -> None:
            nonlocal other, known
            with self._lock:
                require_awake(self._info.model, asleep=self._asleep, closed=self._closed)
                if not known:
                    check_unchanged(other.folder, other.info.weights_hash)
                mine, known = _Weights(self._folder, self._header, self._head, self._info), False
                # No hash meanwhile: if reloading the old weights fails too, the mixture must not carry their hash.
                self._info = replace(mine.info, weights_hash="")
                try:
                    self._reload(other.folder)
                except Exception as error:
                    self._reload(self._folder)
                    self._info = mine.info
                    reason = one_line(error, 200)
                    raise ConfigError(f"vLLM cannot take the weights in {other.folder}: {reason}.") from error
                self._folder, self._header, self._head, self._info = other.folder, other.header, other.head, other.info
                other = mine

        return exchange

    def _refuse_packed(self) -> None:
        tied = self._head is None and self._config.get_text_config().tie_word_embeddings
        mixture = any("expert" in name or "moe" in name for name in self._header)
        if tied or mixture:
            packed, instead = ("experts", "engine transformers") if mixture else ("a tied head", "runner pooling")
            raise ConfigError(
                f"vLLM on a CPU keeps a packed copy of {packed}, which an update of weights does not reach: teacher "
                f"{self._info.model} would compute with a mixture of old and new weights; serve it with {instead}."
            )

    def sleep(self) -> None:
        """Move the weights to host memory and drop the key-value cache. On a CPU the engine only refuses to score."""
        with self._lock:
            if not self._asleep and not self._closed and self._device.type == "cuda":
                self._llm.sleep(level=1)
                self._move_head(torch.device("cpu"))
            self._asleep = True

    def wake(self) -> None:
        """Move the weights back to the device."""
        with self._lock:
            if self._asleep and not self._closed and self._device.type == "cuda":
                self._llm.wake_up()
                self._move_head(self._device)
            self._asleep = False

    def close(self) -> None:
        """End vLLM's engine and free its memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            shutdown = getattr(self._engine.engine_core, "shutdown", None)
            if shutdown is not None:
                shutdown()
            self._llm = self._engine = self._head = None
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    def _run(
        self,
        batch: Sequence[EngineItem],
        request: Callable[[EngineItem], tuple[list[int], Any]],
        receive: Callable[[int, Any], None],
    ) -> None:
        """Submit the batch to vLLM and step it until every sequence is scored or cancelled."""
        running: dict[str, int] = {}
        try:
            for row, entry in enumerate(batch):
                if not entry.cancelled():
                    # A new name for every call: an output for an aborted request must not be taken for this row's.
                    name = f"{row}-{uuid.uuid4().hex}"
                    ids, params = request(entry)
                    self._engine.add_request(name, {"prompt_token_ids": ids}, params)
                    running[name] = row
            while running:
                for output in self._engine.step():
                    if output.finished and output.request_id in running:
                        receive(running.pop(output.request_id), output)
                # Polled between steps: a caller that has left must not hold the batch up until its longest sequence
                # ends.
                gone = [name for name, row in running.items() if batch[row].cancelled()]
                if gone:
                    self._engine.abort_request(gone)
                    for name in gone:
                        del running[name]
        finally:
            if running:
                # After an error or an interrupt, vLLM would continue them beside the next batch.
                self._engine.abort_request(list(running))

    def _pooling_request(self, entry: EngineItem) -> tuple[list[int], Any]:
        from vllm import PoolingParams

        return entry.item.token_ids[:-1].tolist(), PoolingParams(task="token_embed", use_activation=False)

    def _project(self, row: int, output: Any, batch: Sequence[EngineItem], out: list[Scores | None]) -> None:
        head = self._head
        if head is not None:
            item = batch[row].item
            states = output.outputs.data[item.prompt_length - 1 :].to(self._device)
            finish(start(states, [row], batch, head, self._logit_bytes), batch, out, self._info)

    def _read(self, row: int, output: Any, batch: Sequence[EngineItem], out: list[Scores | None]) -> None:
        out[row] = replace(read_scores(output, batch[row], self._info), weights_hash=self._info.weights_hash)

    def _reload(self, folder: Path) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if self._head is None and self._info.padding_rows:
            cut_vocabulary(self._llm, self._info.vocab_size)  # loading may build layers anew
        self._llm.reset_prefix_cache()

    def _move_head(self, device: torch.device) -> None:
        if self._head is not None:
            bias = None if self._head.bias is None else self._head.bias.to(device)
            self._head = replace(self._head, weight=self._head.weight.to(device), bias=bias)


def _check_options(runner: str, device: str, deterministic: bool) -> None:
    if runner not in ("pooling", "generate"):
        raise ConfigError(f"runner {runner!r} is not known; use pooling or generate.")
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(
            f"device {device!r} cannot be chosen: vLLM picks its device itself; use auto, and CUDA_VISIBLE_DEVICES."
        )
    if deterministic:
        raise ConfigError("the vllm engine has no deterministic mode; use the transformers engine for it.")
    require("the vllm engine", "vllm", "vllm")  # asked here, before the model is read


def _start(folder: Path, runner: str, device: torch.device, options: dict[str, Any]) -> Any:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # `pick_device` has let torch look for devices, after which CUDA fails in a forked child; threads may deadlock.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if device.type == "cpu":
        # On a CPU, a child process and compilation cost more time at the start than they save.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        options.setdefault("enforce_eager", True)
    try:
        from vllm import LLM
        from vllm.config import PoolerConfig
    except ImportError as error:
        raise ConfigError(f"the vllm engine needs vLLM ({error}); install it with pip install 'opd[vllm]'.") from error
    if runner == "pooling":
        pooler = PoolerConfig(task="token_embed", use_activation=False)
        options |= {"runner": "pooling", "convert": "embed", "pooler_config": pooler}
    try:
        return LLM(str(folder), **options)
    except Exception as error:
        reason = one_line(error, 300)
        raise ConfigError(f"vLLM cannot load model {folder} with runner {runner}: {reason}.") from error
