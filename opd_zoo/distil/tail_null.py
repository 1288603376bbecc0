"""Null arms: learn from the student's own unlikely tokens, without any teacher.

In each response the `share` of the tokens with the lowest log S(y_t) is selected and gets a negative advantage:

    fixed     A = low
    entropy   A falls from high at the selected token with the lowest student entropy to low at the highest (OPSA)

With the set of tail tokens fixed, the expected gradient of A = -c is c times that of the student's mass in the tail:
the method sharpens the student. A paper reports that it matches the advantages of a real teacher; a distillation that
does not beat it has not shown that its teacher taught anything. It may collapse: watch entropy and length.

Source: arXiv 2608.31046 and its released code; evidence: code read. One difference: the code selects among all tokens
of a data-parallel rank, so its result depends on the number of ranks; here, as in the text, selection is within each
response.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from opd_zoo.distil.selection import spread, top_share
from student.data.needs import SCORES, Needs
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor


class TailNullSettings(TermSettings):
    """Settings of the null arms."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    form: Literal["fixed", "entropy"] = Field(
        "fixed",
        description="fixed: all selected tokens have advantage `low`; entropy: it depends on the student's entropy.",
    )
    share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="Share of each response's tokens, the least likely ones, that is selected; at least one token.",
    )
    low: float = Field(
        -0.5,
        lt=0,
        description="Advantage in form fixed; in form entropy, that of the selected token with the highest entropy. "
        "OPSA has -1.",
    )
    high: float = Field(
        -0.5, lt=0, description="In form entropy: advantage of the selected token with the lowest entropy."
    )


class TailNull(Term[TailNullSettings]):
    """A null arm: a negative advantage for unlikely tokens, without a teacher."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, ranks_tokens=True)

    def needs(self) -> Needs:
        """The student's own log-probs and entropies."""
        return Needs(student=frozenset({SCORES}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """-A log S(y) at the selected tokens, 0 elsewhere; metrics selected_share and entropy (nats)."""
        import torch

        s, scores = self.settings, have(batch.student.scores, "scores")
        entropy = scores.entropy.detach()
        advantages = tail_advantages(
            scores.sampled.detach(),
            entropy,
            batch.row,
            batch.mask,
            s.share,
            s.low,
            s.low if s.form == "fixed" else s.high,
        )
        count = batch.mask.sum()
        # where() instead of a product, because masked values may be NaN, and 0 times NaN is NaN.
        clean = torch.where(batch.mask, entropy, torch.zeros_like(entropy)).sum()
        metrics: dict[str, tuple[Tensor | float, Tensor | float]] = {
            "selected_share": ((advantages != 0).sum(), count),
            "entropy": (clean, count),
        }
        return TermOutput(-advantages * scores.sampled, metrics=metrics)


def tail_advantages(
    logp: Float[Tensor, " n"],
    entropy: Float[Tensor, " n"],
    row: Int[Tensor, " n"],
    mask: Bool[Tensor, " n"],
    share: float,
    low: float,
    high: float,
) -> Float[Tensor, " n"]:
    """[N] advantages: at the least likely `share` of each response between high and low by entropy, 0 elsewhere."""
    import torch

    chosen, _ = top_share(-logp, row, mask, share)
    # `spread` gives 0 where all chosen tokens of a row have one entropy; they count as the most uncertain, as in the
    # released code.
    rank = spread(entropy, row, chosen)
    flat = ~torch.zeros(int(row.max()) + 1 if len(row) else 0, dtype=torch.bool, device=row.device).index_put_(
        (row[rank > 0],), torch.tensor(True, device=row.device)
    )
    rank = torch.where(flat[row], torch.ones_like(rank), rank)
    return torch.where(chosen, high + (low - high) * rank, torch.zeros_like(rank))
