"""The mathematics of distillation: divergences between a teacher T and a student S, and estimators whose bias is known.

    from opd.maths import forward_kl, reverse_kl, jsd, linear_divergence, topk_divergence

`forward_kl` is KL(T || S) and `reverse_kl` is KL(S || T); all values are in nats per token. docs/estimators.md compares
the estimators. Names are imported on first use, so that `import opd.maths` does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opd.maths.diagnostics import PositionProfile, position_profile, support_figures, topk_figures, topk_overlap
    from opd.maths.exact import forward_kl, jsd, reverse_kl, skew_forward_kl, skew_reverse_kl, total_variation
    from opd.maths.head_tail import head_tail_reverse_kl
    from opd.maths.linear.divergence import linear_divergence
    from opd.maths.linear.embedding import expected_embedding
    from opd.maths.linear.inputs import Reference
    from opd.maths.linear.scores import linear_token_scores, linear_topk
    from opd.maths.normalise import LossWeights, token_weights
    from opd.maths.reference import AdjustedPayload, adjusted_log_probs, adjusted_logits, adjusted_payload
    from opd.maths.result import Divergence
    from opd.maths.sampled import sampled_reverse_kl
    from opd.maths.scores import TokenScores, score_tokens
    from opd.maths.spans import span_reverse_kl, sum_over_spans
    from opd.maths.topk import topk_divergence

_HOMES = {
    "AdjustedPayload": "reference",
    "Divergence": "result",
    "PositionProfile": "diagnostics",
    "Reference": "linear.inputs",
    "LossWeights": "normalise",
    "TokenScores": "scores",
    "adjusted_log_probs": "reference",
    "adjusted_logits": "reference",
    "adjusted_payload": "reference",
    "expected_embedding": "linear.embedding",
    "forward_kl": "exact",
    "head_tail_reverse_kl": "head_tail",
    "jsd": "exact",
    "linear_divergence": "linear.divergence",
    "linear_token_scores": "linear.scores",
    "linear_topk": "linear.scores",
    "position_profile": "diagnostics",
    "reverse_kl": "exact",
    "sampled_reverse_kl": "sampled",
    "score_tokens": "scores",
    "skew_forward_kl": "exact",
    "skew_reverse_kl": "exact",
    "span_reverse_kl": "spans",
    "sum_over_spans": "spans",
    "support_figures": "diagnostics",
    "token_weights": "normalise",
    "topk_divergence": "topk",
    "topk_figures": "diagnostics",
    "topk_overlap": "diagnostics",
    "total_variation": "exact",
}
__all__ = [
    "AdjustedPayload",
    "Divergence",
    "LossWeights",
    "PositionProfile",
    "Reference",
    "TokenScores",
    "adjusted_log_probs",
    "adjusted_logits",
    "adjusted_payload",
    "expected_embedding",
    "forward_kl",
    "head_tail_reverse_kl",
    "jsd",
    "linear_divergence",
    "linear_token_scores",
    "linear_topk",
    "position_profile",
    "reverse_kl",
    "sampled_reverse_kl",
    "score_tokens",
    "skew_forward_kl",
    "skew_reverse_kl",
    "span_reverse_kl",
    "sum_over_spans",
    "support_figures",
    "token_weights",
    "topk_divergence",
    "topk_figures",
    "topk_overlap",
    "total_variation",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"opd.maths.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'opd.maths' has no attribute {name!r}")
