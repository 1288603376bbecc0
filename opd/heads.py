"""What lies between a transformers model's final hidden states and its logits: scale and soft-cap by family.

Which config field of which family means what stands here once, for students and teachers.
"""

from collections.abc import Callable
from typing import Any

# Field of the model's (text) config -> logit scale. Granite and MiniCPM divide by `logits_scaling`, HyperCLOVA X
# multiplies by it; Cohere's, Falcon-H1's and Muse's fields multiply.
_SCALES: dict[str, Callable[[str, float], float]] = {
    "logit_scale": lambda family, value: value,
    "logits_scaling": lambda family, value: value if family.startswith("hyperclovax") else 1.0 / value,
    "lm_head_multiplier": lambda family, value: value,
    "output_multiplier": lambda family, value: value,
}
# Gemma 2, 3, 3n, 4, T5Gemma, VaultGemma, NanoChat: soft_cap * tanh(logits / soft_cap).
_SOFT_CAP = "final_logit_softcapping"


def scale_and_cap(config: Any) -> tuple[float, float]:
    """(logit scale, soft-cap) of a transformers text config; (1.0, 0.0) when the family has neither."""
    scale = 1.0
    for name, rule in _SCALES.items():
        value = getattr(config, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
            scale *= rule(str(getattr(config, "model_type", "")), float(value))
    cap = getattr(config, _SOFT_CAP, None)
    return scale, float(cap) if cap else 0.0


def caps_attention(config: Any) -> bool:
    """Whether a transformers text config soft-caps attention logits (Gemma 2), which sdpa drops unsaid."""
    return bool(getattr(config, "attn_logit_softcapping", None))
