"""The reference engine: any causal language model of transformers, exact for every payload, on any device.

The base model runs up to the final norm. Only response positions go through the head, one block of rows at a time
within a byte budget, and are reduced to their payload in float32 on the device. `teacher_server.engines.backbone` says
how rows share forward passes, and docs/engines.md what that costs and saves.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from opd.adapters import fold_adapter, is_adapter, split_adapter
from opd.attention import keep_scores
from opd.errors import ConfigError, UnavailableError
from opd.heads import OutputHead, scale_and_cap
from opd.model_files import check_files
from opd.pretrained import read_config
from opd.wire.fingerprint import weights_hash
from opd.wire.types import Head, PayloadKind, PayloadSpec, ScoreItem, Scores
from teacher_server.engines.abilities import (
    check_head,
    find_abilities,
    find_positions,
    lengths_to_try,
    rows_are_independent,
    speed_attention,
)
from teacher_server.engines.backbone import Backbone
from teacher_server.engines.base import EngineInfo, EngineItem, Exchange, check_batch, require_awake
from teacher_server.engines.head import DTYPE_NAMES, export, identity_of
from teacher_server.engines.loading import (
    check_finite,
    check_same_architecture,
    counted_ids,
    load_model,
    load_stop_token_ids,
    load_tokenizer_identity,
    pick_device,
    pick_dtype,
    resolve_folder,
)
from teacher_server.engines.plan import Pass, plan_independent, plan_passes
from teacher_server.engines.project import LEAST_ROWS, Started, finish, start


class TransformersEngine:
    """Reference: exact for every payload, on any device.

    Runs one teacher with transformers.

    Args:
        model: folder written by save_pretrained, or a hub id. BASE+ADAPTER names a PEFT adapter too, whose product is
            added to the weights. Weights must be safetensors.
        device: "auto" (the accelerator if there is one), "cpu", "cuda", "cuda:1", ...
        dtype: "f32", "bf16", "f16", or "auto": that of the checkpoint on accelerators, f32 on the CPU.
        deterministic: make a row's scores bit-equal whatever it is batched with. Each row is padded to a width that
            depends on the row alone and shares passes only with rows of that width, or runs by itself where that is not
            enough.
        max_batch_tokens: most tokens in a forward pass, padding included.
        logit_bytes: bytes of logits that may exist at once on the device.
        revision: revision of a hub id.
        trust_remote_code: run model code from the folder or the hub; leave it off unless you have read that code.
        share_prompts: let samples of one prompt share its keys and values; never done in deterministic mode.
        attention: attention implementation of transformers; "auto" is flash attention if it is installed and gives this
            model's numbers, else eager for models that cap their attention logits (Gemma 2), else the default of
            transformers.

    Raises:
        ConfigError: if the model cannot be loaded, or this engine cannot reproduce its logits.
    """

    takes_adapters = True

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        deterministic: bool = False,
        max_batch_tokens: int = 16_384,
        logit_bytes: int = 256 << 20,
        revision: str | None = None,
        trust_remote_code: bool = False,
        share_prompts: bool = True,
        attention: str = "auto",
    ) -> None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("logit_bytes", logit_bytes)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, but it must be at least 1.")
        self._lock = threading.RLock()
        self._asleep = self._closed = False
        self._max_batch_tokens, self._logit_bytes = max_batch_tokens, logit_bytes
        self._trust = trust_remote_code
        self._device = pick_device(device)  # first, so that a wrong name is reported at once
        base, self._adapter = split_adapter(model)
        folder = self._folder = resolve_folder(base, revision, with_code=trust_remote_code)
        self._config = read_config(folder, trust_remote_code=trust_remote_code)
        self._tokenizer = load_tokenizer_identity(folder, trust_remote_code=trust_remote_code)
        self._dtype = pick_dtype(dtype, self._device, self._config)
        options = {} if attention == "auto" else {"attn_implementation": attention}
        self._model = load_model(
            folder, self._config, self._dtype, self._device, trust_remote_code=trust_remote_code, **options
        )
        keep_scores(self._model, options.get("attn_implementation"), "attention")
        if self._adapter is not None:
            self._model = fold_adapter(self._model, self._adapter)
        # Base model and head are run separately, so that prompts are never projected to the vocabulary.
        if self._model.base_model is self._model or self._model.get_output_embeddings() is None:
            raise ConfigError(
                f"model {model} has no base model and output head that can be run separately; use another engine."
            )
        self._backbone = Backbone(self._model.base_model, self._device)
        rows = len(self._model.get_output_embeddings().weight)
        self._padding = rows - counted_ids(self._tokenizer, rows)
        head = self._head()
        with torch.inference_mode():
            check_head(self._model, self._backbone, head, model)
            if attention == "auto":
                speed_attention(self._model, self._backbone, head)
            packing = "flash" in str(self._model.config._attn_implementation)
            most, self._turn = find_positions(self._config, self._backbone)
            self._abilities = find_abilities(
                self._backbone,
                head,
                lengths_to_try(self._config, self._backbone, self._turn or most),
                packing=packing,
                sharing=share_prompts and not deterministic,
            )
        self._info = self._describe(model, folder, head, most, deterministic)
        # On a GPU the shape of the whole batch decides the kernel, and with it the bits of each row.
        self._independent = deterministic and self._device.type == "cpu" and self._abilities.padding
        self._independent = self._independent and rows_are_independent(
            self._digest, self._info.vocab_size, self._info.max_sequence_tokens
        )

    @property
    def info(self) -> EngineInfo:
        """Identity and abilities; changes when weights are replaced."""
        return self._info

    def score(self, batch: Sequence[EngineItem]) -> list[Scores | None]:
        """Score a batch: one result per item, in order; None for an item that was cancelled.

        Cancellation is polled before each forward pass. Values are returned in the dtypes "f16", "f32" and "bf16" as
        asked; for "u16" in float32, which the codec quantises.

        Raises:
            InvalidRequestError: if an item exceeds a limit of `info`.
            NonFiniteError: if the model produced NaN or infinity for an item.
            UnavailableError: if the engine sleeps or is closed.
        """
        check_batch(self._info, batch)
        out: list[Scores | None] = [None] * len(batch)
        with self._lock, torch.inference_mode():
            require_awake(self._info.model, asleep=self._asleep, closed=self._closed)
            try:
                self._run(batch, out)
            finally:
                self._backbone.forget()
        return out

    def head(self) -> Head:
        """The output head, for clients that take hidden states."""
        with self._lock:
            if self._closed:
                raise UnavailableError(f"teacher {self._info.model} is closed; load it again.")
            head = export(self._head(), self._info.head.hash if self._info.head else "")
        # Copied, because weights are replaced in place, possibly while the head is being sent.
        return replace(head, weight=head.weight.copy(), bias=None if head.bias is None else head.bias.copy())

    def memory_bytes(self) -> int:
        """Bytes of all parameters and buffers; tied ones count once."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    def prepare_weights(self, folder: Path) -> Exchange:
        """Read new weights into host memory as a whole and check them; the exchange swaps them in place.

        The folder of a PEFT adapter stands for this engine's base model with that adapter.

        Between exchanges the host holds the set that is not in use, so that the old weights can be restored even if
        their folder is gone.

        Raises:
            ConfigError: if the folder cannot be read or lacks tensors.
            IncompatibleTeacherError: if its config.json describes another architecture.
            NonFiniteError: if a tensor holds NaN or infinity.
        """
        folder = Path(folder)
        check_files(folder)
        if (folder / "config.json").is_file():
            check_same_architecture(self._config, read_config(folder, trust_remote_code=self._trust), folder)
        adapter = folder if is_adapter(folder) else None
        base = folder if adapter is None else self._folder
        new_hash = weights_hash(base, adapter)
        model = load_model(base, self._config, self._dtype, torch.device("cpu"), trust_remote_code=self._trust)
        if adapter is not None:
            model = fold_adapter(model, adapter)
        spare: dict[str, Tensor] = model.state_dict()
        check_finite(spare, folder)
        # Hashed here so that the exchange, for which calls have to wait, is quick and cannot fail half-way.
        other = replace(self._info, weights_hash=new_hash, head=identity_of(self._head(model)))

        def exchange() -> None:
            nonlocal other
            with self._lock, torch.no_grad():
                if self._closed:
                    raise UnavailableError(f"teacher {self._info.model} is closed; load it again.")
                self._swap(spare)
                self._info, other = other, self._info

        return exchange

    def sleep(self) -> None:
        """Move the weights to host memory. On a CPU nothing is moved; the engine only refuses to score."""
        with self._lock:
            # Set first: if the move fails half-way, the engine must refuse to score rather than use half its weights.
            self._asleep = True
            self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Move the weights back to the device."""
        with self._lock:
            self._move(self._device)
            self._asleep = False

    def close(self) -> None:
        """Free the weights; the engine cannot be used afterwards."""
        with self._lock:
            self._closed = True
            self._backbone.forget()
            self._model = self._backbone.model = torch.nn.Module()
            _release(self._device)

    def _swap(self, spare: dict[str, Tensor]) -> None:
        """Exchange the contents of the weights in use with those of `spare`."""
        swapped = set()
        for name, tensor in self._model.state_dict().items():
            # Tied weights are one tensor under two names, and a second swap would undo the first.
            if tensor.data_ptr() not in swapped:
                swapped.add(tensor.data_ptr())
                old = tensor.to("cpu", copy=True)
                tensor.copy_(spare[name])
                spare[name].copy_(old)
        self._backbone.forget()

    def _run(self, batch: Sequence[EngineItem], out: list[Scores | None]) -> None:
        """Run the passes; the results of each are collected after the next is launched, so that copies overlap it."""
        head = self._head()
        waiting: list[Started] = []
        for one in self._plan([entry.item for entry in batch]):
            rows = [row for row in one.rows if not batch[row].cancelled()]
            if not rows:
                continue
            started = self._start(replace(one, rows=tuple(rows)), batch, head)
            finish(waiting, batch, out, self._info)
            waiting = started
        finish(waiting, batch, out, self._info)

    def _plan(self, items: Sequence[ScoreItem]) -> list[Pass]:
        lengths = [(item.prompt_length, item.response_length) for item in items]
        if self._independent:
            most = self._info.max_sequence_tokens
            return plan_independent(lengths, max_tokens=self._max_batch_tokens, most=most, turn=self._turn)
        if self._info.deterministic or not self._abilities.padding:
            return [Pass((row,)) for row in range(len(items))]
        return plan_passes(
            [item.token_ids[: item.prompt_length].tobytes() for item in items],
            lengths,
            max_tokens=self._max_batch_tokens,
            share=self._abilities.sharing,
            packed=self._abilities.packing,
            longest=self._turn,
        )

    def _start(self, one: Pass, batch: Sequence[EngineItem], head: OutputHead) -> list[Started]:
        """Launch a forward pass and the copies of its payloads."""
        items = [batch[row].item for row in one.rows]
        if one.width:
            states = self._backbone.padded(items, one.width)
            return start(states, one.rows, batch, head, self._logit_bytes, LEAST_ROWS)
        if len(items) == 1:
            states = self._backbone.alone(items[0])
        elif one.shared:
            states = self._backbone.shared(items)
        elif self._abilities.packing:
            states = self._backbone.packed(items)
        else:
            states = self._backbone.padded(items)
        return start(states, one.rows, batch, head, self._logit_bytes)

    def _digest(self, items: list[ScoreItem]) -> list[bytes]:
        """The bits of each item's scores."""
        spec = PayloadSpec.topk(min(8, self._info.vocab_size), "f32")
        digests = []
        for scores in self.score([EngineItem(item, spec) for item in items]):
            parts = [] if scores is None else [scores.sampled, scores.values, scores.ids, scores.log_tail]
            digests.append(b"".join(part.tobytes() for part in parts if part is not None))
        return digests

    def _head(self, model: Any = None) -> OutputHead:
        projection = (self._model if model is None else model).get_output_embeddings()
        scale, cap = scale_and_cap(self._config.get_text_config())
        return OutputHead(projection.weight, getattr(projection, "bias", None), scale, cap, self._padding)

    def _describe(self, model: str, folder: Path, head: OutputHead, most: int, deterministic: bool) -> EngineInfo:
        stop_ids = load_stop_token_ids(folder, self._config, self._tokenizer, head.vocab_size)
        return EngineInfo(
            engine=f"transformers {transformers.__version__}",
            model=model,
            weights_hash=weights_hash(folder, self._adapter),
            compute_dtype=DTYPE_NAMES[self._dtype],
            vocab_size=head.vocab_size,
            tokenizer=self._tokenizer,
            head=identity_of(head),
            payloads=frozenset(PayloadKind),
            supports_temperature=True,
            max_sequence_tokens=most,
            max_k=head.vocab_size,
            deterministic=deterministic,
            padding_rows=head.padding,
            stop_token_ids=stop_ids,
            spans=True,
        )

    def _move(self, device: torch.device) -> None:
        if self._device.type != "cpu" and not self._closed:
            self._backbone.forget()
            self._model.to(device)
            _release(self._device)


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
