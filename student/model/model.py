"""The student model: loading it, running it to hidden states, and projecting these to what the terms need.

The head is applied in tiles, to response positions only, so logits of all positions are never held at once.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from opd import maths
from opd.adapters import adapter_settings, fold_adapter, is_adapter, split_adapter
from opd.attention import keep_scores
from opd.errors import ConfigError, OpdError, one_line
from opd.heads import OutputHead, scale_and_cap
from opd.maths import TokenScores
from opd.maths.linear.divergence import gathered
from opd.model_path import refuse_missing
from opd.pretrained import check_ids, read_causal_lm, read_config, read_tokenizer
from student.data.hooks import ModelHook, Reading, around
from student.data.needs import HIDDEN, SCORES, SCORES_AT_TEACHER
from student.data.prefixes import Prefixes
from student.data.token_batch import StudentTokens, TokenBatch
from student.model.continued import states_after
from student.model.lora import add_lora, load_factors
from student.model.quantized import four_bits, keep_layout
from student.model.recompute import recompute
from student.model.turn import turn_of
from student.settings.model import LoraSettings, ModelSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a student's weights come from.

    Attributes:
        base: folder or hub id of the model, and of its tokenizer.
        revision: revision of a hub id.
        adapter: folder of a PEFT adapter to put on top of the model.
    """

    base: str
    revision: str | None = None
    adapter: Path | None = None

    @classmethod
    def of(cls, model: ModelSettings, path: str | None = None) -> "Weights":
        """The weights of the recipe's model, or those at `path`: a model, a PEFT adapter's folder or BASE+ADAPTER."""
        if path is None:
            start = None if model.lora is None else model.lora.start
            return cls(model.path, model.revision, None if start is None else Path(start).expanduser())
        base, adapter = split_adapter(path)
        if adapter is not None:
            return cls(base, None, adapter)
        if not is_adapter(path):
            return cls(path)
        if model.lora is not None:
            return cls(model.path, model.revision, Path(path))
        saved = adapter_settings(Path(path))
        return cls(str(saved.get("base_model_name_or_path") or model.path), saved.get("revision"), Path(path))

    def skeleton(self, wanted: Callable[[PreTrainedConfig], bool] = lambda config: True) -> PreTrainedModel | None:
        """The base model on torch's meta device, without weights; building a large one takes seconds.

        Args:
            wanted: whether a model with this config is to be built at all.

        Returns:
            None if it is not wanted or cannot be built, which loading it refuses with the reason.
        """
        try:
            config = read_config(self.base, revision=self.revision)
            if not wanted(config):
                return None
            with torch.device("meta"):
                model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        except (OpdError, OSError, ValueError):
            return None
        return model


class _AsRead(GenerationConfig):
    """A generation config that is saved exactly as it was loaded.

    transformers loads sampling flags without do_sample but refuses to save them.
    """

    def validate(self, *arguments: Any, **keywords: Any) -> None:
        """Accept everything, because the config came with the model."""


def load_student(
    path: str,
    *,
    dtype: str,
    attention: str | None,
    gradient_checkpointing: bool,
    dropout: bool = False,
    revision: str | None = None,
    lora: LoraSettings | None = None,
    adapter: Path | None = None,
) -> "Student":
    """Load a causal LM from a folder or the hub.

    Args:
        path: folder or hub id.
        dtype: name of the weights' torch dtype; adapters are float32.
        attention: attention implementation, or None for the model's default.
        gradient_checkpointing: recompute activations in the backward pass.
        dropout: learn in train mode; see `Student`.
        revision: revision of a hub id.
        lora: train adapters instead of the weights.
        adapter: folder of a PEFT adapter. With `lora`, training starts from it; without, it is merged into the weights.

    Raises:
        ConfigError: if the model cannot be loaded, its files do not have just the tensors that its config calls for, it
            has no output head, makes logits that its head does not explain, has a soft-cap on attention logits that
            "sdpa" would drop, or layers that cannot be recomputed.
        UnavailableError: if the hub cannot be reached for it.
    """
    config = read_config(path, revision=revision)
    extra: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    quantized = lora is not None and lora.quantize is not None
    if quantized:
        extra["quantization_config"] = four_bits(getattr(torch, dtype))
    model = read_causal_lm(path, config=config, revision=revision, dtype=getattr(torch, dtype), **extra)
    keep_scores(model, attention, "model.attention")
    if quantized:
        keep_layout(model)
    if model.can_generate():
        model.generation_config = _AsRead.from_dict(model.generation_config.to_dict())
    if adapter is not None and lora is None:
        model = fold_adapter(model, adapter).requires_grad_(True)
    if lora is not None:
        add_lora(model, lora, base=path, revision=revision)
        if adapter is not None:
            load_factors(model, adapter, lora)
    if gradient_checkpointing:
        recompute(model)
    student = Student(model, starts_at_base=lora is not None and lora.start is None, dropout=dropout)
    check_head(student, path)
    return student


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the student's tokenizer.

    Raises:
        ConfigError: if there is no tokenizer at `path`, it cannot be loaded, or has ids that the model does not have.
        UnavailableError: if the hub cannot be reached for it.
    """
    refuse_missing(path)
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(path, revision=revision)
    check_ids(tokenizer, path, revision)
    return tokenizer


class Student(nn.Module):
    """A causal LM whose forward stops at the final hidden states, so that the head is applied only where needed.

    Args:
        lm: the model.
        starts_at_base: whether the model has adapters and, with them off, is the model that the run started from.
        dropout: learn in train mode, with whatever is random in it. Otherwise the model stays in eval mode, in which it
            is sampled from, so that it learns the distribution that was sampled.

    Attributes:
        beside: parameters that terms train along with the model; not saved as part of it.
        hooks: hooks on every forward pass; see `student.data.hooks`.
        turn: length beyond which a row changes the positions of all rows in its pass; longer rows share none with
            shorter ones. See `student.model.turn`.
    """

    def __init__(self, lm: PreTrainedModel, *, starts_at_base: bool = False, dropout: bool = False) -> None:
        super().__init__()
        self.starts_at_base = starts_at_base
        self.dropout = dropout
        if lm.get_output_embeddings() is None:
            raise ConfigError(
                f"model {lm.name_or_path!r} ({type(lm).__name__}) has no output head; use a causal language model."
            )
        self.lm = lm
        self.beside = nn.ModuleDict()
        self.hooks: Sequence[ModelHook] = ()
        self.turn = turn_of(lm)
        self.train()

    def train(self, mode: bool = True) -> "Student":
        """Enter the mode in which the student learns, or eval mode; without `dropout` they are the same."""
        return super().train(mode and self.dropout)

    def around(self, reading: Callable[[], Reading]) -> AbstractContextManager[None]:
        """The hooks around one forward pass; `reading` is called only if there are hooks."""
        return around(self.hooks, self.lm, reading()) if self.hooks else nullcontext()

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        attention_mask: Int[Tensor, "b l"],
        row: Int[Tensor, " n"],
        source: Int[Tensor, " n"],
        prefixes: Prefixes | None = None,
    ) -> Float[Tensor, "n h"]:
        """Final hidden states [N, H], after the final norm, at positions (row, source): the inputs of the head.

        With `prefixes`, `input_ids` is what follows them; see `TokenBatch.prefixes`.
        """
        if prefixes is not None:
            return states_after(self.lm, prefixes, input_ids, attention_mask, row, source)
        # The base model, because the head would compute logits [B, L, V] of all positions.
        base = self.lm.base_model
        # With padding on the right, a causal model gives the same bits without a mask [B, L, L], and sdpa can use its
        # fastest kernel. Flash attention needs the mask to leave the padding out.
        mask = None if self.lm.config._attn_implementation == "sdpa" else attention_mask
        return base(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state[row, source]

    def head(self) -> OutputHead:
        """The output head, with gradient; gathered from all ranks if the student is sharded."""
        output = self.lm.get_output_embeddings()
        scale, cap = scale_and_cap(self.lm.config.get_text_config())
        bias = getattr(output, "bias", None)
        return OutputHead(gathered(output.weight), None if bias is None else gathered(bias), scale, cap)


class _Drawn(BaseModelOutputWithPast):
    """A decoder output that has hidden states, and None for any other field that a model family reads."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def check_head(student: Student, path: str) -> None:
    """Check that the model's own logits, from which it is sampled, equal those of `OutputHead`, on which it learns.

    The layers do not run, so the check is cheap for a model of any size: the final hidden states are random, at three
    scales, the largest far beyond any soft-cap.

    Raises:
        ConfigError: if the logits differ, because the family computes them in a way that `OutputHead` does not know.
    """
    why = "its layers cannot be run without its head" if student.lm.base_model is student.lm else _difference(student)
    if why:
        raise ConfigError(
            f"model {path!r} ({type(student.lm).__name__}) computes logits in a way that is not supported ({why}), so "
            "it would learn from other logits than it samples from; train another student."
        )


@torch.no_grad()
def _difference(student: Student) -> str:
    lm, head = student.lm, student.head()
    drawn = torch.randn(3, head.weight.shape[1], generator=torch.Generator().manual_seed(0))
    states = (drawn * torch.tensor([[1.0], [10.0], [100.0]])).to(head.weight)
    # The decoder and not the base model, because OPT's forward calls the decoder inside it directly.
    inner: Any = lm.base_model
    decoder = inner.get_decoder().__dict__
    held = decoder.get("forward")
    given: Any = states[None]
    decoder["forward"] = lambda *_, **__: _Drawn(last_hidden_state=given)
    try:
        ids = torch.ones((1, 3), dtype=torch.long, device=lm.device)
        own = lm(input_ids=ids, use_cache=False).logits[0].float()
        projected = head.logits(student(ids, ids, torch.zeros_like(ids[0]), torch.arange(3, device=lm.device)))
        largest = own.abs().amax(-1).clamp_min(1e-30)  # a head of zeros agrees with itself
        gap = float(((projected[:, : own.shape[1]] - own).abs().amax(-1) / largest).max())
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        return one_line(error, 200)
    finally:
        if held is None:
            del decoder["forward"]
        else:
            decoder["forward"] = held
    # Wide enough for half precision, and written so that NaN fails.
    return "" if gap <= 0.05 else f"its logits differ from head times hidden states by {gap:.2g} of the largest"


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """What to compute from hidden states, and how.

    Attributes:
        want: what terms need, a subset of {"scores", "scores_at_teacher", "hidden"}.
        valid_vocab: number of ids that the tokenizer can produce; further rows of the head are padding and get no
            probability.
        temperature: divides the logits.
        scratch_bytes: bound on the memory of a tile of logits, bytes; 0 for the device's default.
    """

    want: frozenset[str]
    valid_vocab: int
    temperature: float
    scratch_bytes: int = 0


def logits_of(hidden: Float[Tensor, "n h"], head: OutputHead, spec: ProjectionSpec) -> Float[Tensor, "n v"]:
    """Float32 logits over the valid vocabulary, with scale and soft-cap, divided by the temperature; no gradient."""
    padding = len(head.weight) - spec.valid_vocab
    logits = replace(head, padding=padding).logits(hidden)
    return logits if spec.temperature == 1.0 else logits / spec.temperature


def project(
    hidden: Float[Tensor, "n h"],
    head: OutputHead,
    batch: TokenBatch,
    teacher_ids: Int[Tensor, "n k"] | None,
    spec: ProjectionSpec,
) -> StudentTokens:
    """Compute what `spec.want` names of the student's distribution at every response position of the micro-batch."""
    scores = _scores(hidden, head, batch.token_ids, batch.candidates, spec) if SCORES in spec.want else None
    at_teacher = None
    if SCORES_AT_TEACHER in spec.want and teacher_ids is not None:
        at_teacher = _scores(hidden, head, batch.token_ids, teacher_ids, spec)
    wants_hidden = HIDDEN in spec.want
    return StudentTokens(scores, at_teacher, hidden if wants_hidden else None, head if wants_hidden else None)


def _scores(
    hidden: Tensor, head: OutputHead, token_ids: Tensor, ids: Tensor | None, spec: ProjectionSpec
) -> TokenScores:
    """Log-probs at the response token and at `ids`, tile by tile, without logits of size N x V."""
    return maths.linear_token_scores(
        hidden,
        head,
        candidate_ids=ids,
        sampled_ids=token_ids,
        temperature=spec.temperature,
        vocab_size=spec.valid_vocab,
        scratch_bytes=spec.scratch_bytes or None,
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and restore its mode on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
