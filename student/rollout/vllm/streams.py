"""Draws tokens inside vLLM, each from its row's own random stream, with the same code as engine transformers.

vLLM calls logits processors before it samples. This one draws the token itself, records its log-prob at the row's
temperature and the row's candidates, and leaves vLLM with logits in which only that token is possible. vLLM thus runs
the model, its cache and its scheduler, but makes no random choice, and need not compute or move log-probs.

vLLM may ask for a position more than once (for a prompt that it prefills in chunks, or a row that it preempts and
resumes); the last draw counts. This module imports vLLM, so only the engine imports it, when it starts.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from student.rollout.draw import draw_mixed, most_likely
from student.rollout.vllm.draws import DRAWS, Draw

__all__ = ["RowStreams"]


class RowStreams(LogitsProcessor):  # type: ignore[misc]
    """The logits processor that draws for the rows of a batch; vLLM constructs it. See the module docstring."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Draw, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """False, because the processor decides which token is taken, even in greedy decoding."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Track the places of the rows in the batch."""
        process_dict_updates(self._rows, batch_update, _entry)

    def apply(self, logits: Tensor) -> Tensor:
        """Draw a token for each row; returns logits [rows, V] that are -inf except at these tokens."""
        if not self._rows:
            return logits
        places = sorted(self._rows)
        draws = [self._rows[place][0] for place in places]
        positions = [len(self._rows[place][1]) for place in places]
        spec, device = draws[0].spec, logits.device
        at = torch.tensor(places, device=device)
        chosen = logits[at, : spec.valid_vocab].float()
        uniforms = [draw.uniform(position) for draw, position in zip(draws, positions, strict=True)]
        levels = [draw.temperature for draw in draws]
        drawn = torch.tensor(uniforms, dtype=torch.float64, device=device)
        ids, logp = draw_mixed(chosen, drawn, levels, spec.valid_vocab)
        for line, (draw, position) in enumerate(zip(draws, positions, strict=True)):
            if (token := draw.forced(position)) is not None:
                ids[line], logp[line] = token, (chosen[line] / (draw.temperature or 1.0)).log_softmax(-1)[token]
        top = None
        if spec.candidates:
            top = most_likely(chosen, spec.candidates, spec.keep_ids).cpu().numpy().astype(np.uint32)
        for line, (token, log_prob) in enumerate(zip(ids.tolist(), logp.tolist(), strict=True)):
            draws[line].put(positions[line], token, log_prob, None if top is None else top[line])
        logits[at] = -torch.inf
        logits[at, ids] = 0.0
        return logits


def _entry(params: Any, prompt_ids: list[int] | None, output_ids: list[int]) -> tuple[Draw, list[int]] | None:
    """The row's draw, and vLLM's own list of the row's tokens, whose length is the next position."""
    name = (params.extra_args or {}).get("draw")
    return None if name is None else (DRAWS[name], output_ids)
