"""Frozen base weights in 4 bits (QLoRA, arXiv 2305.14314), by bitsandbytes.

In nf4, blocks of 64 weights share a scale, which is itself stored in 8 bits in blocks of 256: 4.13 bits per weight. A
layer's weight is dequantized to model.dtype before a matrix product.
"""

from typing import Any

import torch

from opd.errors import ConfigError

_SCALES, _SCALES_OF_SCALES = 64, 256


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
