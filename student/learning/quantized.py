"""What bitsandbytes holds in fewer bits: frozen bases (QLoRA, arXiv 2305.14314), AdamW's moments (arXiv 2110.02861).

nf4          blocks of 64 weights share a scale, itself in 8 bits over blocks of 256: 4.13 bits a weight; products
             widen a layer's weight to model.dtype first
adamw_8bit   blocks of 256 moments share a scale: 2.03 bytes a parameter instead of 8; tensors of fewer than 4,096
             elements stay in float32
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from opd.errors import ConfigError

_SCALES, _SCALES_OF_SCALES = 64, 256
_MOMENTS, _LEAST = 256, 4096
CODES = "state1"
"""A key of the optimizer's state that torch's AdamW does not have."""


def import_bitsandbytes() -> Any:
    """The module bitsandbytes.

    Raises:
        ConfigError: when it is not installed.
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
    """What transformers needs to know to read a model's linear layers, all but the head, in 4 bits.

    Args:
        dtype: of products, and of what is not quantized.
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
    """Have 4-bit layers keep the layout of their weights.

    On CPUs with products in bfloat16 bitsandbytes packs them anew, in place, at the first forward in eval mode, and a
    packed weight passes no gradient on to what is before it, silently.
    """
    layer = import_bitsandbytes().nn.Linear4bit
    for module in model.modules():
        if isinstance(module, layer):
            module.support_avx512bf16_for_cpu = False


def four_bit_bytes(weights: int) -> int:
    """Bytes of so many weights in 4 bits, with their scales."""
    scales = -(-weights // _SCALES)
    return -(-weights // 2) + scales + 4 * -(-scales // _SCALES_OF_SCALES)


def moment_bytes(sizes: Iterable[int]) -> int:
    """Bytes of AdamW's moments in 8 bits of tensors with so many elements."""
    return sum(8 * n if n < _LEAST else 2 * (n + 4 * -(-n // _MOMENTS)) for n in sizes)


def adamw_8bit(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """AdamW of bitsandbytes with moments in 8 bits; arguments as for torch's."""
    found: torch.optim.Optimizer = import_bitsandbytes().optim.AdamW8bit(groups, lr=lr, betas=betas)
    return found


def same_kind(moments: Mapping[str, Mapping[str, Tensor]], optimizer: str) -> bool:
    """Whether saved moments, by parameter, are those of `train.optimizer`."""
    return all((CODES in state) == (optimizer == "adamw_8bit") for state in moments.values() if state)
