"""A teacher of a fleet as a model of transformers, for trainers that call their teacher themselves.

    teacher = FleetModel(TeacherFleet.connect("10.0.0.1:7070"), "math")
    trainer = DistillationTrainer(model=student, teacher_model=teacher, ...)     # TRL 1.16

A forward pass sends the tokens to the fleet and gets the last hidden states back; the head, fetched once, is applied
here. So a trainer gets the teacher's whole distribution, and its divergence is exact, without the teacher's layers in
its memory.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from opd.errors import InvalidRequestError
from opd.fleet.source import ScoreSource
from opd.heads import OutputHead, from_bits
from opd.wire.types import Head, PayloadSpec, ScoreItem


class FleetConfig(PretrainedConfig):
    """Sizes of the teacher, and what its head does to logits, under the names by which trainers look for them."""

    model_type = "opd_fleet"
    vocab_size: int = 0
    hidden_size: int = 0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None


class FleetModel(PreTrainedModel):
    """A causal language model without gradient whose layers are a fleet's and whose head is here.

    Args:
        fleet: the fleet; it belongs to this process, so each rank connects its own.
        teacher: the teacher's name; it must serve hidden states and its head.
        states: dtype in which hidden states travel, "bf16" or "f32".
        dtype: of the head and of what `forward` returns, the student's own.

    Raises:
        TeacherNotFoundError: if there is no such teacher, or it does not serve its head.
    """

    config_class = FleetConfig
    base_model_prefix = "layers"

    def __init__(
        self, fleet: ScoreSource, teacher: str, *, states: str = "bf16", dtype: torch.dtype = torch.float32
    ) -> None:
        served = fleet.head(teacher)
        head = OutputHead.received(served)
        super().__init__(
            FleetConfig(
                vocab_size=head.weight.shape[0],
                hidden_size=head.weight.shape[1],
                logit_scale=head.scale,
                final_logit_softcapping=head.soft_cap or None,
            )
        )
        vocabulary, width = head.weight.shape
        self.lm_head = nn.Linear(width, vocabulary, bias=head.bias is not None, dtype=dtype, device="meta")
        self.lm_head.weight = nn.Parameter(head.weight.to(dtype), requires_grad=False)
        if head.bias is not None:
            self.lm_head.bias = nn.Parameter(head.bias.to(dtype), requires_grad=False)
        self.layers = _FleetLayers(fleet, teacher, served, PayloadSpec.hidden(states), dtype)

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    @torch.no_grad()
    def forward(
        self, input_ids: Int[Tensor, "b s"], attention_mask: Int[Tensor, "b s"] | None = None, **others: Any
    ) -> CausalLMOutput:
        """The logits [b, s, V], or those of the last `logits_to_keep` positions; where the mask is 0 they are void.

        Raises:
            InvalidRequestError: for inputs that are not tokens, such as embeddings, images or a cache.
            OpdError: if the fleet cannot score a row.
        """
        states = self.layers(input_ids, attention_mask, **others).last_hidden_state
        head = OutputHead(
            self.lm_head.weight,
            self.lm_head.bias,
            scale=self.config.logit_scale,
            soft_cap=self.config.final_logit_softcapping or 0.0,
        )
        return CausalLMOutput(logits=head.logits(states.flatten(0, 1)).unflatten(0, states.shape[:2]))


class _FleetLayers(nn.Module):
    """What trainers call `base_model`: from tokens to hidden states."""

    def __init__(self, fleet: ScoreSource, teacher: str, head: Head, spec: PayloadSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self._fleet, self._teacher, self._spec, self._dtype = fleet, teacher, spec, dtype
        self._head, self._width = head.hash, head.weight.shape[1]

    def forward(
        self,
        input_ids: Int[Tensor, "b s"],
        attention_mask: Int[Tensor, "b s"] | None = None,
        logits_to_keep: int = 0,
        use_cache: bool = False,
        **others: Any,
    ) -> BaseModelOutput:
        """Hidden states [b, s, H] after the final norm, of the last `logits_to_keep` positions if that is not 0."""
        given = sorted(name for name, value in others.items() if value is not None and isinstance(value, Tensor))
        if given or use_cache:
            raise InvalidRequestError(
                f"A fleet's teacher reads tokens alone, but the call has {', '.join(given) or 'use_cache'}."
            )
        ids = input_ids.cpu().numpy()
        real = np.ones(ids.shape, bool) if attention_mask is None else attention_mask.cpu().numpy().astype(bool)
        kept = np.zeros(ids.shape, bool)
        kept[:, -logits_to_keep:] = real[:, -logits_to_keep:]  # -0 keeps all
        rows = [row for row in range(len(ids)) if kept[row].any()]
        # States predict the next token, so a token more is sent: it is not read by any state that is asked for.
        items = [
            ScoreItem(np.append(ids[row, real[row]], 0), int(real[row].sum() - kept[row].sum()) + 1) for row in rows
        ]
        scored = self._fleet.wait(self._fleet.submit_many(self._teacher, items, self._spec))
        if self._fleet.head(self._teacher).hash != self._head:
            raise InvalidRequestError(
                f"Teacher {self._teacher!r} has another head since its weights were replaced; make a new FleetModel."
            )
        states = torch.zeros((*ids.shape, self._width), dtype=self._dtype)
        for row, scores in zip(rows, scored, strict=True):
            assert scores.hidden is not None
            states[row, torch.from_numpy(kept[row])] = from_bits(torch.from_numpy(scores.hidden)).to(self._dtype)
        kept_states = states[:, -logits_to_keep:].to(input_ids.device)
        return BaseModelOutput(last_hidden_state=kept_states)  # type: ignore[arg-type]  # a Tensor of any dtype will do
