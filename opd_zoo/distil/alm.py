"""Approximate likelihood matching: the log-probs of chunks of text, matched across tokenizers (objective "alm").

A chunk c is a run of text that both models can write; ls = log S(c) and lt = log T(c) are sums over their own tokens.
With p = exp(ls / tau) and q = exp(lt / tau), the loss of a chunk, at its first token and with its gradient through ls:

    kl    q log(q / p) + (1 - q) log((1 - q) / (1 - p));   for tau from 50 on its limit, (lt - ls) + lt log(ls / lt)
    tvd   |p - q| + |(1 - p) - (1 - q)|;                    for tau from 50 on 2 |lt - ls|

A chunk whose texts both models find certain says nothing, and has no gradient. As published, a chunk closes only at a
token of the same text on both sides: "ab" against "a", "b" is joined with what follows, and lost at the end of a
response. `chunks: spans` closes one wherever both tokenizers have a boundary.

After EasyOPD's losses (alm/losses.py, bbb59ed) and arXiv 2503.20083; evidence: text and code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field

from opd import maths
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import SCORES, TEACHER, Needs, SignalNeed
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import NDArray
    from torch import Tensor

    from student.data.row import Row

_LIMIT = 50.0
"""Temperature from which on the published code takes the limit."""
_CERTAIN = -1e-6
"""Log-prob to which those nearer to 0 are lowered, because the losses divide by them."""


class AlmSettings(TermSettings):
    """Settings of approximate likelihood matching."""

    form: Literal["kl", "tvd"] = Field("kl", description="Distance between the probabilities of a chunk.")
    temperature: float = Field(100.0, gt=0, description="tau, which flattens the probabilities of chunks.")
    chunks: Literal["published", "spans"] = Field(
        "spans",
        description="Where a chunk closes. spans: where both tokenizers have a boundary; published: only at a token of "
        "the same text on both sides.",
    )


class Alm(Term[AlmSettings]):
    """Matching of the likelihoods of chunks of text across tokenizers (ALM)."""

    @property
    def traits(self) -> Traits:
        return Traits(sums_teachers=True, learns_from_given_rows=True, learns_from_stale_rows=True)

    def needs(self) -> Needs:
        """Log-probs of the text from both models."""
        need = SignalNeed(TEACHER, PayloadSpec.sampled(), spans=True)
        return Needs(signals=(need,), student=frozenset({SCORES}))

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The loss of each chunk, at its first token; metric alm_chunks, tokens in a chunk."""
        signal, scores = batch.signal(PayloadKind.SAMPLED), have(batch.student.scores, "scores")
        every = torch.arange(len(batch.mask), device=batch.mask.device)
        span = every if signal.span is None else signal.span
        if self.settings.chunks == "published":
            span = self._joined(batch, span)
        counted = batch.mask & (span == every)
        taught = torch.where(batch.mask, have(signal.sampled, "sampled log-probs"), 0.0)
        mine = torch.where(batch.mask, scores.sampled, 0.0)
        mine, taught = maths.sum_over_spans(mine, span), maths.sum_over_spans(taught, span)
        loss = chunk_loss(mine, taught, self.settings.form, self.settings.temperature)
        inside = (batch.mask & (span >= 0)).sum()
        return TermOutput(torch.where(counted, loss, 0.0), None, {"alm_chunks": (inside, batch.mask.sum())})

    @staticmethod
    def _joined(batch: TokenBatch, span: Tensor) -> Tensor:
        """The spans, joined as the published code does."""
        parts, begin = [], 0
        for row in batch.rows:
            part = span[begin : begin + row.length].cpu().numpy() - begin
            parts.append(torch.from_numpy(np.where(part < 0, -1, _closed(row, part) + begin)))
            begin += row.length
        return torch.cat(parts).to(span.device).clamp(min=-1)


def _closed(row: Row, span: NDArray[np.int64]) -> NDArray[np.int64]:
    """[T] the first position of each token's chunk; below 0 for what no token of the same text follows."""
    translation = next(iter(row.translations.values()), None)
    if translation is None:
        return span
    inside = span >= 0
    mine = np.bincount(span[inside], minlength=row.length)
    theirs = np.bincount(translation.of[translation.of >= 0], minlength=row.length)
    firsts = np.flatnonzero(mine > 0)
    closes = (mine == 1) & (theirs == 1)
    chunk = np.cumsum(closes[firsts]) - closes[firsts]
    begins = np.array([*firsts[np.unique(chunk, return_index=True)[1]], -row.length - 1])
    last = int(closes[firsts].sum())
    of_first = np.where(chunk < last, begins[chunk], -row.length - 1)
    found = np.full(row.length, -row.length - 1)
    found[inside] = of_first[np.searchsorted(firsts, span[inside])]
    return found


def chunk_loss(
    student: Float[Tensor, " n"], teacher: Float[Tensor, " n"], form: str, temperature: float
) -> Float[Tensor, " n"]:
    """The loss of chunks with these log-probs, nats; see the module."""
    ls, lt = student.clamp(max=_CERTAIN), teacher.clamp(max=_CERTAIN)
    if temperature >= _LIMIT:
        return 2.0 * (lt - ls).abs() if form == "tvd" else (lt - ls) + lt * (ls / lt).log()
    ls, lt = ls / temperature, lt / temperature
    if form == "tvd":
        return 2.0 * (lt.exp() - ls.exp()).abs()
    rest = (-lt.expm1()).log() - (-ls.expm1()).log()
    return lt.exp() * (lt - ls) - lt.expm1() * rest
