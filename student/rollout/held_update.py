"""How much of what was learned arrives in the weights that a rollout engine holds in its own precision.

    held = <r(w) - r(w0), w - w0> / <w - w0, w - w0>      r rounds to the engine's dtype

w0 are the weights of the adapters' base, or else those of the first sync. Where w0 has few bits, as a base that was
published in bfloat16, an update that is small beside the weights is lost in rounding: of one of 1e-3 of the weights
about half arrives, of 1e-4 a sixteenth.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from student.model.lora import has_lora

log = logging.getLogger(__name__)
_ENTRIES = 4096
"""Entries of a tensor that are looked at, evenly spaced: over all tensors a million for a model of 300."""
_LEAST = 0.9


class HeldUpdate:
    """Compares weights that are sent to an engine with those that training started from.

    Args:
        model: the student, whose frozen base is the start of its adapters.
        dtype: name of the engine's dtype.
    """

    def __init__(self, model: PreTrainedModel, dtype: str) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._start: dict[str, Tensor] = {}
        self._along = self._square = 0.0
        self._warned = False
        for name, module in model.named_modules() if has_lora(model) else ():
            weight = getattr(getattr(module, "base_layer", None), "weight", None)
            if isinstance(weight, Tensor) and weight.is_floating_point() and not isinstance(weight, DTensor):
                self._start[f"{name}.weight"] = _entries(weight)

    def through(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass on the names and tensors of the saved model, before they are rounded, and look at them."""
        for name, tensor in tensors:
            if tensor.is_floating_point():
                entries = _entries(tensor)
                start = self._start.setdefault(name, entries)
                learned = entries.double() - start.double()
                arrived = entries.to(self._dtype).double() - start.to(self._dtype).double()
                self._along += float(arrived @ learned)
                self._square += float(learned @ learned)
            yield name, tensor

    def adapters(self, factors: Mapping[str, Tensor]) -> None:
        """Look at adapters that an engine applies itself, before they are rounded; w - w0 is the product of two.

        Args:
            factors: all of them under the names of PEFT's files.
        """
        for name, tensor in factors.items():
            if ".lora_B." in name:
                b, a = tensor, factors[name.replace(".lora_B.", ".lora_A.")]
                held_b, held_a = (factor.to(self._dtype).double() for factor in (b, a))
                # <DC, BA> = <D'B, CA'>, without a tensor of the weight's size.
                self._along += float(((held_b.T @ b.double()) * (held_a @ a.T.double())).sum())
                self._square += float(((b.T.double() @ b.double()) * (a.double() @ a.T.double())).sum())

    def report(self, count: Callable[[str, float], None]) -> None:
        """Count what has passed since the last report, and warn the first time that much of it did not arrive."""
        along, square, self._along, self._square = self._along, self._square, 0.0, 0.0
        count("update_along", along)
        count("update_square", square)
        if square and along < _LEAST * square and not self._warned:
            self._warned = True
            log.warning(
                "rollouts hold %.0f %% of what was learned: the rest is lost when weights are rounded to %s; set "
                "rollout.engine.dtype: float32, or with model.lora let the engine apply the adapters (vllm by itself, "
                "vllm_server and sglang_server without merge_adapters; not with dora)",
                100 * along / square,
                str(self._dtype).removeprefix("torch."),
            )


def _entries(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, len(flat) // _ENTRIES)].to("cpu", torch.float32, copy=True)
