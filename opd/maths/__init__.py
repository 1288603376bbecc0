"""The mathematics of distillation: divergences between a teacher T and a student S, and their honest estimators.

    from opd.maths import forward_kl, reverse_kl, jsd, linear_divergence, topk_divergence

`forward_kl` is KL(T || S), `reverse_kl` is KL(S || T); everything is in nats per token. docs/estimators.md compares the
estimators. Names are imported on first use, so that `import opd.maths` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.maths.exact import forward_kl, jsd, reverse_kl, skew_forward_kl, skew_reverse_kl, total_variation
    from opd.maths.linear import HeadSettings, Reference, linear_divergence
    from opd.maths.partial import head_tail_reverse_kl
    from opd.maths.result import Divergence
    from opd.maths.sampled import sampled_reverse_kl
    from opd.maths.scores import TokenScores, score_tokens
    from opd.maths.topk import topk_divergence

_HOMES = {
    "Divergence": "result",
    "HeadSettings": "linear",
    "Reference": "linear",
    "TokenScores": "scores",
    "forward_kl": "exact",
    "head_tail_reverse_kl": "partial",
    "jsd": "exact",
    "linear_divergence": "linear",
    "reverse_kl": "exact",
    "sampled_reverse_kl": "sampled",
    "score_tokens": "scores",
    "skew_forward_kl": "exact",
    "skew_reverse_kl": "exact",
    "topk_divergence": "topk",
    "total_variation": "exact",
}
__all__ = [
    "Divergence",
    "HeadSettings",
    "Reference",
    "TokenScores",
    "forward_kl",
    "head_tail_reverse_kl",
    "jsd",
    "linear_divergence",
    "reverse_kl",
    "sampled_reverse_kl",
    "score_tokens",
    "skew_forward_kl",
    "skew_reverse_kl",
    "topk_divergence",
    "total_variation",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"opd.maths.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'opd.maths' has no attribute {name!r}")
