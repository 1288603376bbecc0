"""Direct Advantage Policy Optimisation (dapo_direct): fits each reasoning step's log-ratio to the step's advantage.

    A_k   = V(s_{k+1}) - V(s_k) of step k, V behind the last step the reward
    loss  = mean over the steps of (A_k / beta - sum over its tokens of [log pi(y_t) - log pi_ref(y_t)])^2

Steps end after `separator`, or are the turns of an episode. V is method critic's and is learnt from whole answers; the
paper first fits V to sampled continuations of every step and then freezes it, as `fits_until` does. A squared loss has
the same minimum whatever policy wrote the steps, so rows may be given ones. This is not the DAPO of decoupled clips,
which is term dapo. Source: arXiv 2412.18279 (text in part; beta is not stated there).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd.wire.types import PayloadKind, PayloadSpec
from opd_zoo.text_spans import ends_of, pieces_of
from student.data.needs import REFERENCE, SCORES, Needs, SignalNeed
from student.data.outcome import reward_of
from student.data.token_batch import TokenBatch, have
from student.plugin.terms import Term, TermOutput, TermSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from student.data.row import Row


class DirectAdvantageSettings(TermSettings):
    """Settings of Direct Advantage PO."""

    rows: Literal["all", "sampled", "expert"] = "all"
    aggregation: str = "sequence_mean"
    beta: float = Field(
        0.1,
        gt=0,
        description="How far a step's log-ratio to the reference may go for a given advantage: the smaller, the "
        "farther.",
    )
    separator: str = Field(
        "\n\n", description="Text that ends a reasoning step within a turn; empty makes each turn one step."
    )


class DirectAdvantage(Term[DirectAdvantageSettings]):
    """Fits the log-ratio of each reasoning step to its advantage (Direct Advantage PO)."""

    evidence: ClassVar[str] = "text"

    @property
    def traits(self) -> Traits:
        return replace(super().traits, reads=("values",))

    def __init__(self, settings: DirectAdvantageSettings) -> None:
        super().__init__(settings)
        self._tokenizer: Any = None

    def needs(self) -> Needs:
        """The reference's and the student's log-probs of the response tokens, and rewards."""
        signals = (SignalNeed(REFERENCE, PayloadSpec.sampled()),)
        return Needs(signals=signals, student=frozenset({SCORES}), reward="any")

    def bind(self, tokenizer: Any) -> None:
        """Keep the tokenizer, which shows where steps end."""
        self._tokenizer = tokenizer

    def selects(self, row: Row) -> bool:
        """Whether the row has a reward."""
        return super().selects(row) and reward_of(row) is not None

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """Loss per position: tokens share their step's loss so that the mean over a row is the mean over its steps.

        Metrics reasoning_steps (mean per row), step_advantage (mean |A_k|) and step_gap (mean summed log-ratio of a
        step, nats).
        """
        import torch

        live = have(batch.student.scores, "scores").sampled
        known = have(batch.signal(PayloadKind.SAMPLED, REFERENCE).sampled, "reference's log-probs").to(live.dtype)
        gap = torch.where(batch.mask, live - known, torch.zeros_like(live))
        index, wanted, share, first = [], [], [], 0
        for row in batch.rows:
            places, advantages = self.steps(row)
            sizes = np.bincount(places[row.loss_mask], minlength=len(advantages))
            index.append(places + first)
            wanted += list(advantages)
            # The objective averages over the row's tokens, but the mean over its steps is wanted: each token of a step
            # with n of the row's N trained tokens has weight N / (K n), where the row has K steps.
            share.append(row.loss_mask.sum() / (max(1, np.count_nonzero(sizes)) * np.maximum(sizes, 1))[places])
            first += len(advantages)
        step = torch.from_numpy(np.concatenate(index)).to(live.device)
        target = torch.tensor(wanted, dtype=live.dtype, device=live.device)
        total = torch.zeros_like(target).index_add(0, step, gap)
        losses = (target / self.settings.beta - total) ** 2
        weights = torch.from_numpy(np.concatenate(share)).to(live)
        count = float(len(wanted))
        return TermOutput(
            losses[step] * weights,
            metrics={
                "reasoning_steps": (count, float(len(batch.rows))),
                "step_advantage": (target.abs().sum(), count),
                "step_gap": (total.detach().sum(), count),
            },
        )

    def steps(self, row: Row) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """[T] index of each token's step in a row, and [K] the advantage of each step."""
        if len(row.turns) > 1 or row.windows:
            # A step begins where the student acts: the environment's answer after the last turn belongs to no new step,
            # and models that read a cut history have no value there.
            starts, ends = [start for start, _ in row.turns], [end for _, end in row.turns[:-1]]
        else:
            ends = []
            if self.settings.separator and self._tokenizer is not None:
                ends = ends_of(pieces_of(row.response_ids, self._tokenizer), self.settings.separator)
            ends = [end for end in ends if end < row.length]
            starts = [0, *ends]
        places = np.searchsorted(np.array(ends, np.int64), np.arange(row.length), side="right")
        values = np.zeros(row.length) if (v := row.critic.values) is None else v.astype(np.float64)
        # V at the start of each step, then the reward: the advantages of a row add up to R - V(start).
        at = [values[start] for start in starts] + [reward_of(row) or 0.0]
        return places, np.diff(np.array(at))
