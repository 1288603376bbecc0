"""Quantized storage by bitsandbytes: frozen base weights (QLoRA, arXiv 2305.14314), AdamW moments (arXiv 2110.02861).

nf4          blocks of 64 weights share a scale, which is itself stored in 8 bits in blocks of 256: 4.13 bits per
             weight; a layer's weight is dequantized to model.dtype before a matrix product
adamw_8bit   blocks of 256 moments share a scale: 2.03 bytes per parameter instead of 8; tensors of fewer than 4,096
             elements keep float32 moments
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from opd.errors import ConfigError

_SCALES, _SCALES_OF_SCALES = 64, 256
_MOMENTS, _LEAST = 256, 4096
CODES = "state1"
"""A key of bitsandbytes' optimizer state, which torch's AdamW does not have."""


def import_bitsandbytes() -> Any:
    """Import bitsandbytes.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"model.lora.quantize and train.optimizer adamw_8bit need bitsandbytes ({error}); install it with pip "
            "install 'opd[quantized]'."
        ) from None
    return bitsandbytes


def four_bits(dtype: torch.dtype) -> Any:
    """The transformers config that loads a model's linear layers, except the head, in 4 bits.

    Args:
        dtype: dtype of matrix products, and of everything that is not quantized.
    """
    import_bitsandbytes()
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def keep_layout(model: torch.nn.Module) -> None:
    """Keep 4-bit layers from repacking their weights.

    On CPUs with bfloat16 instructions, bitsandbytes repacks a weight in place at the first forward pass in eval mode,
    and a repacked weight silently passes no gradient to its input.
    """
    layer = import_bitsandbytes().nn.Linear4bit
    for module in model.modules():
        if isinstance(module, layer):
            module.support_avx512bf16_for_cpu = False


def four_bit_bytes(weights: int) -> int:
    """Bytes that `weights` weights take in 4 bits, scales included."""
    scales = -(-weights // _SCALES)
    return -(-weights // 2) + scales + 4 * -(-scales // _SCALES_OF_SCALES)


def moment_bytes(sizes: Iterable[int]) -> int:
    """Bytes of 8-bit AdamW moments for tensors with the given numbers of elements."""
    return sum(8 * n if n < _LEAST else 2 * (n + 4 * -(-n // _MOMENTS)) for n in sizes)


def adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Make bitsandbytes' AdamW with 8-bit moments; the arguments are those of torch's AdamW."""
    found: torch.optim.Optimizer = import_bitsandbytes().optim.AdamW8bit(groups, lr=lr, betas=betas)
    return found


def same_kind(moments: Mapping[str, Mapping[str, Tensor]], optimizer: str) -> bool:
    """Whether saved moments, by parameter name, come from the kind of optimizer that `train.optimizer` names."""
    return all((CODES in state) == (optimizer == "adamw_8bit") for state in moments.values() if state)
