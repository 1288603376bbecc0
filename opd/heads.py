"""The output head, from hidden states to logits: one implementation for students, teachers and the mathematics.

    logits = soft_cap * tanh(scale * (weight @ h + bias) / soft_cap)

`OutputHead` computes this formula, also in half precision. A head travels as `opd.wire.types.Head`, which
`OutputHead.received` converts. `scale_and_cap` knows the config fields that hold scale and soft-cap in each model
family of transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from opd.wire.types import Head

# Vocabulary entries per step where a half-precision head has to be widened through a temporary.
_VOCABULARY_STEP = 8192

# Fields of a model's (text) config that give its logit scale. Granite and MiniCPM divide by `logits_scaling`, while
# HyperCLOVA X multiplies by it. Inkling divides; the fields of Cohere, Falcon-H1 and Muse multiply.
_SCALES: dict[str, Callable[[str, float], float]] = {
    "logit_scale": lambda family, value: value,
    "logits_scaling": lambda family, value: value if family.startswith("hyperclovax") else 1.0 / value,
    "lm_head_multiplier": lambda family, value: value,
    "output_multiplier": lambda family, value: value,
    "logits_mup_width_multiplier": lambda family, value: 1.0 / value,
}
# soft_cap * tanh(logits / soft_cap): Gemma 2, 3, 3n, 4, T5Gemma, VaultGemma, NanoChat; RecurrentGemma; xLSTM.
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def scale_and_cap(config: Any) -> tuple[float, float]:
    """(logit scale, soft-cap) of a transformers text config; (1.0, 0.0) if the family has neither."""
    scale = 1.0
    for name, rule in _SCALES.items():
        value = getattr(config, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
            scale *= rule(str(getattr(config, "model_type", "")), float(value))
    cap = next((cap for name in _SOFT_CAPS if (cap := getattr(config, name, None))), 0.0)
    return scale, float(cap)


def from_bits(received: Tensor) -> Tensor:
    """A tensor of the wire, of which uint16 stands for the bits of bfloat16 (numpy has none)."""
    return received.view(torch.bfloat16) if received.dtype == torch.uint16 else received


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """The head of a language model: logits = soft_cap * tanh(scale * (weight @ h + bias) / soft_cap) for V ids.

    Attributes:
        weight: [R, H], any float dtype; R = V + padding.
        bias: [R] or None.
        scale: factor on the projection; 1.0 for none.
        soft_cap: bound on the magnitude of logits; 0.0 for none.
        padding: number of rows at the end that belong to no token; logits do not include them.
    """

    weight: Float[Tensor, "R H"]
    bias: Float[Tensor, " R"] | None = None
    scale: float = 1.0
    soft_cap: float = 0.0
    padding: int = 0

    @classmethod
    def of(cls, head: "OutputHead | Float[Tensor, 'V H']") -> "OutputHead":
        """A head as it is; a bare weight matrix as a head without bias, scale and soft-cap."""
        return head if isinstance(head, OutputHead) else cls(head)

    @classmethod
    def received(cls, head: Head, device: torch.device | str = "cpu") -> "OutputHead":
        """The head that the wire carried, in float32 on `device`."""

        def tensor(array: NDArray[Any]) -> Tensor:
            return from_bits(torch.from_numpy(array)).float().to(device)

        bias = None if head.bias is None else tensor(head.bias)
        return cls(tensor(head.weight), bias, head.logit_scale, head.soft_cap)

    def times(self, factor: float) -> "OutputHead":
        """The head whose logits are `factor` times these, for another temperature or power.

        Raises:
            ValueError: for a factor other than 1 if there is a soft-cap, after which logits cannot be scaled.
        """
        if factor != 1.0 and self.soft_cap:
            raise ValueError(f"the logits of a head with soft_cap {self.soft_cap} cannot be multiplied by {factor}.")
        return replace(self, scale=self.scale * factor)

    @property
    def vocab_size(self) -> int:
        """V, the number of ids that count."""
        return len(self.weight) - self.padding

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits: float32, or float64 for a float64 head."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def logits(self, hidden: Float[Tensor, "N H"], out: Float[Tensor, "N V"] | None = None) -> Float[Tensor, "N V"]:
        """Logits of hidden states, not divided by any temperature; no gradient.

        A half-precision head is multiplied into float32: its products are not rounded back to 16 bits, as in the
        model's own forward pass (which changes logits of 16 to 32 by up to 0.06).

        Args:
            hidden: [N, H] after the final norm, any float dtype.
            out: [N, V] of `dtype`, to be written to instead of a new tensor.
        """
        # The following works in place, which autograd would refuse.
        with torch.no_grad():
            out = self._project(hidden, out)
            if self.bias is not None:
                out += self.bias[: self.vocab_size]
            if self.scale != 1.0:
                out *= self.scale
            if self.soft_cap:
                out.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return out

    def through_cap_(self, gradient: Float[Tensor, "N V"], logits: Float[Tensor, "N V"]) -> None:
        """Takes a gradient with respect to the capped logits back through the soft-cap, in place."""
        if self.soft_cap:
            gradient *= 1.0 - (logits / self.soft_cap).square()

    def _project(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        if out is None and self.padding and has_matrix_units(hidden):
            # Project all rows and cut afterwards: heads are padded because odd widths keep a GPU from its fast kernels.
            return OutputHead(self.weight)._project(hidden, None)[:, : self.vocab_size]
        weight = self.weight[: self.vocab_size]
        if out is None:
            # With an explicit dtype, because a model that another thread is loading changes torch's default for all
            # threads.
            out = torch.empty(len(hidden), len(weight), dtype=self.dtype, device=hidden.device)
        if weight.dtype == out.dtype:
            return torch.mm(hidden.to(out.dtype), weight.t(), out=out)
        if has_matrix_units(out):
            return torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=out.dtype, out=out)
        wide = hidden.to(out.dtype)
        for step in vocabulary_steps(len(weight)):
            out[:, step] = wide @ weight[step].t().to(out.dtype)
        return out


def vocabulary_steps(vocabulary: int) -> Iterator[slice]:
    """Slices that cover the vocabulary in steps whose widened copies are small."""
    for start in range(0, vocabulary, _VOCABULARY_STEP):
        yield slice(start, min(start + _VOCABULARY_STEP, vocabulary))


def has_matrix_units(tensor: Tensor) -> bool:
    """Whether the device multiplies half precision into float32; True for meta, so that plans follow a GPU's path."""
    return tensor.device.type in ("cuda", "meta")
