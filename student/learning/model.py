"""The student model: load, run to the hidden states of response positions, project to what the terms asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from opd import maths
from opd.errors import ConfigError
from opd.heads import OutputHead, caps_attention, scale_and_cap
from opd.maths import TokenScores
from opd.maths.linear.divergence import gathered
from student.data.batch import MicroBatch
from student.learning.terms import HeadWeights, StudentTokens
from student.scoring.needs import HIDDEN, SCORES, SCORES_AT_TEACHER


def load_student(
    path: str, *, dtype: str, attention: str | None, gradient_checkpointing: bool, revision: str | None = None
) -> tuple["Student", PreTrainedTokenizerBase]:
    """Load a causal LM with its tokenizer from a folder or the hub.

    Raises:
        ConfigError: when there is no such model, it has no output head, or "sdpa" would drop its attention soft-cap.
    """
    tokenizer = load_tokenizer(path, revision)
    try:
        if attention in (None, "sdpa"):
            attention = _attention(attention, AutoConfig.from_pretrained(path, revision=revision).get_text_config())
        extra: dict[str, Any] = {"attn_implementation": attention} if attention else {}
        model = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=getattr(torch, dtype), **extra)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise _cannot_load(path, error) from error
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Student(model), tokenizer


def _attention(name: str | None, config: Any) -> str | None:
    if not caps_attention(config):
        return name
    if name == "sdpa":
        raise ConfigError("model.attention 'sdpa' drops this model's soft-cap on attention logits; use eager.")
    return "eager"


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load the student's tokenizer.

    Raises:
        ConfigError: when there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError) as error:
        raise _cannot_load(path, error) from error


def _cannot_load(path: str, error: Exception) -> ConfigError:
    if not Path(path).exists():
        return ConfigError(f"student {path!r} is neither a folder nor a model that the hub gives; check model.path.")
    if not (Path(path) / "config.json").is_file():
        hint = f"; did you mean {path}/model?" if (Path(path) / "model").is_dir() else "."
        return ConfigError(f"student folder {path!r} is not a model: it has no config.json{hint}")
    reason = " ".join(str(error).split())
    return ConfigError(f"student folder {path!r} cannot be loaded: {reason[:300].rstrip('.')}.")


class Student(nn.Module):
    """A causal LM whose forward stops at the final hidden states, so that the head is applied only where needed."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        if lm.get_output_embeddings() is None:
            raise ConfigError(f"model {lm.name_or_path!r} ({type(lm).__name__}) has no output head; give a causal LM.")
        self.lm = lm

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        attention_mask: Int[Tensor, "b l"],
        row: Int[Tensor, " n"],
        source: Int[Tensor, " n"],
    ) -> Float[Tensor, "n h"]:
        """Final hidden states (after the final norm) at (row, source), the inputs of the head."""
        base = self.lm.base_model
        states = base(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return states[row, source]

    def head(self) -> HeadWeights:
        """The output head with gradient; gathered whole when it is sharded."""
        output = self.lm.get_output_embeddings()
        scale, cap = scale_and_cap(self.lm.config.get_text_config())
        bias = getattr(output, "bias", None)
        return HeadWeights(gathered(output.weight), None if bias is None else gathered(bias), scale, cap)


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """How hidden states are projected.

    Attributes:
        want: what terms ask for, of {"scores", "scores_at_teacher", "hidden"}.
        valid_vocab: ids the tokenizer can produce; further rows of the head are padding and get no probability.
        temperature: divides the logits.
        scratch_bytes: bound on the tiles of logits, bytes; 0 for the default of the device.
    """

    want: frozenset[str]
    valid_vocab: int
    temperature: float
    scratch_bytes: int = 0


def logits_of(hidden: Float[Tensor, "n h"], head: HeadWeights, spec: ProjectionSpec) -> Float[Tensor, "n v"]:
    """Float32 logits over the valid vocabulary, with scale and soft-cap, divided by the temperature; no gradient."""
    padding = len(head.weight) - spec.valid_vocab
    logits = OutputHead(head.weight, head.bias, head.logit_scale, head.soft_cap, padding).logits(hidden)
    return logits if spec.temperature == 1.0 else logits / spec.temperature


def project(
    hidden: Float[Tensor, "n h"],
    head: HeadWeights,
    batch: MicroBatch,
    teacher_ids: Int[Tensor, "n k"] | None,
    spec: ProjectionSpec,
) -> StudentTokens:
    """What `spec.want` asks of the student's distribution at every response position of the micro-batch."""
    scores = _scores(hidden, head, batch.token_ids, batch.candidates, spec) if SCORES in spec.want else None
    at_teacher = None
    if SCORES_AT_TEACHER in spec.want and teacher_ids is not None:
        at_teacher = _scores(hidden, head, batch.token_ids, teacher_ids, spec)
    wants_hidden = HIDDEN in spec.want
    return StudentTokens(scores, at_teacher, hidden if wants_hidden else None, head if wants_hidden else None)


def _scores(
    hidden: Tensor, head: HeadWeights, token_ids: Tensor, ids: Tensor | None, spec: ProjectionSpec
) -> TokenScores:
    """Log-probs at the response token and at `ids`, in tiles: logits of size N x V are never held."""
    return maths.linear_token_scores(
        hidden,
        head.weight,
        candidate_ids=ids,
        sampled_ids=token_ids,
        settings=maths.HeadSettings(head.bias, head.logit_scale, head.soft_cap),
        temperature=spec.temperature,
        vocab_size=spec.valid_vocab,
        scratch_bytes=spec.scratch_bytes or None,
    )
