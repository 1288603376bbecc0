"""ArCHer's critic: twin Q and V heads of whole turns (utterances), fitted off policy by temporal differences.

    Q_j(s_k, a_k) <- r_k + discount V'_j(s_{k+1})      V' = 0 after the last turn
    V_j(s_k)      <- Q'_j(s_k, a_k)                    j = 1, 2; primes are target copies of the heads

s_k is the history before turn k and a_k is the turn. Advantage `archer` says what credit comes of them. Each fit is one
AdamW step on the mean squared errors of `batch` turns, drawn from a replay buffer of the last `buffer` turns of all
ranks, whichever policy wrote them. After each fit the target copies move towards the heads by the fraction `tau`.
Rewards are those of each turn where the environment gives them; otherwise the last turn has the reward of the episode.
An answer without turns counts as one turn.

Source: arXiv 2402.19446 and the released code, YifeiZhou02/ArCHer (archer/algorithms/archer/trainer.py: these losses,
discount 0.9, tau 0.1, a warm-up of the critic). Four differences from that code:

- The heads are linear in the hidden states of the student's first weights, taken before and after the turn; the code
  trains RoBERTa with layers of its own.
- V is fitted to the turn that was written; the code samples a new turn from the policy at each state.
- The credit of a step comes from the critic as it was before it was fitted on that step.
- The policy learns from the turns of the step and not from the buffer, and without a baseline per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from student.data.needs import Needs
from student.data.streams import stream
from student.plugin.traits import Traits
from student.rl.fitted import FittedSettings, TurnCritic, spans_of, turn_rewards
from student.rl.value_head import adamw

if TYPE_CHECKING:
    from student.data.row import Row
    from student.plugin.controllers import Services

Array = NDArray[np.float64]


class ArcherCriticSettings(FittedSettings):
    """Settings of ArCHer's critic."""

    discount: float = Field(0.9, ge=0, le=1, description="gamma, by which the rewards of later turns are discounted.")
    tau: float = Field(
        0.1, gt=0, le=1, description="Fraction by which the target copies move towards the heads after each fit."
    )
    buffer: int = Field(10_000, ge=1, description="Number of turns in the replay buffer.")
    batch: int = Field(256, ge=1, description="Number of turns in a fit, drawn with replacement.")
    learning_rate: float = Field(1e-3, gt=0, description="Learning rate of the heads.")
    seed: int = Field(0, ge=0, description="Seed of the second heads' initial weights and of the draws.")


class ArcherCritic(TurnCritic[ArcherCriticSettings]):
    """Twin Q and V heads of turns, fitted off policy, for advantage archer (ArCHer).

    Its state is heads, target copies, AdamW's moments, the buffer and the number of fits.
    """

    evidence: ClassVar[str] = "abstract"
    traits = Traits(works_ahead=True, gives=("archer_values",), why={"gives": "use advantage archer"})

    def __init__(self, settings: ArcherCriticSettings) -> None:
        super().__init__(settings)
        self._turns: list[tuple[tuple[Any, ...], Array]] = []
        # For hidden states of width H: V's [2, H + 1] and Q's [2, 2 H + 1] side by side, each with its bias last.
        # Created in the first fit, when H is known.
        self.heads: Array | None = None
        self.copies: Array | None = None
        self.moments: Array | None = None
        self.buffer: Array | None = None  # [N, 3 H + 2], oldest first; see `gradient_of`
        self.fitted = 0

    def needs(self) -> Needs:
        """Hidden states under the student's first weights, read in process, and rewards."""
        return Needs(reward="any", models=frozenset({"initial"}))

    def compose(self, rows: list[Row]) -> list[Row]:
        """Read the states before and after each turn, and write the advantage of each turn on its tokens."""
        self._turns = []
        for row, hidden in self.states(rows):
            spans = spans_of(row)
            before, behind = hidden[[start for start, _ in spans]], hidden[[end for _, end in spans]]
            credit = np.zeros(row.length, np.float32)
            for (start, end), value in zip(spans, self.advantages(before, behind), strict=True):
                credit[start:end] = value
            self.write(row, credit)
            if (rewarded := turn_rewards(row)) is None:
                continue
            key, rewards = rewarded
            after = np.concatenate([before[1:], np.zeros_like(before[:1])])
            goes_on = np.arange(len(spans)) < len(spans) - 1
            self._turns.append((key, np.concatenate([before, behind, after, rewards[:, None], goes_on[:, None]], 1)))
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics archer/warm_up, archer/q_loss, archer/v_loss, archer/q and archer/buffer.

        The losses are mean squared errors, summed over the two heads, and archer/q is the mean of Q, all before the
        first fit of the step. archer/buffer counts the turns in the buffer; archer/warm_up is 1 during the warm-up.
        """
        return super().after_update(step, services)

    def advantages(self, before: Array, behind: Array) -> Array:
        """[turns] min Q - min V, from states [turns, H] before and after each turn; zeros before the first fit."""
        if self.heads is None:
            return np.zeros(len(before))
        q, v = values(self.heads, before, behind)
        found: Array = q.min(0) - v.min(0)
        return found

    def fit(self, services: Services) -> dict[str, float]:
        """Add the turns of all ranks to the buffer and make the step's fits; returns the metrics for `after_update`."""
        mine, self._turns = self._turns, []
        # Every rank holds the same buffer in the same order and takes the same float64 steps, so the heads stay equal.
        told = self.in_order(mine, services)
        kept = [] if self.buffer is None else [self.buffer]
        if not kept and not told:
            return {}
        s = self.settings
        buffer = np.concatenate([*kept, *told])[-s.buffer :]
        heads, copies, moments = self._ready((buffer.shape[1] - 2) // 3)
        first: tuple[float, float, float] = (0.0, 0.0, 0.0)
        for number in range(s.fits):
            rng = stream(s.seed, "archer", self.fitted + number)
            drawn = buffer[rng.integers(len(buffer), size=s.batch)]
            gradient, losses = gradient_of(heads, copies, drawn, s.discount)
            first = losses if number == 0 else first
            heads, moments = adamw(heads, moments, gradient, self.fitted + number + 1, s.learning_rate)
            copies = (1 - s.tau) * copies + s.tau * heads
        self.heads, self.copies, self.moments, self.buffer = heads, copies, moments, buffer
        self.fitted += s.fits
        names = ("archer/q_loss", "archer/v_loss", "archer/q")
        warm_up = {"archer/warm_up": float(self._now < s.warm_up), "archer/buffer": float(len(buffer))}
        return warm_up | dict(zip(names, first, strict=True))

    def _ready(self, width: int) -> tuple[Array, Array, Array]:
        if self.heads is None or self.copies is None or self.moments is None:
            heads = 0.01 * stream(self.settings.seed, "archer").standard_normal((2, 3 * width + 2))
            heads[0] = 0.0
            return heads, heads.copy(), np.zeros((2, *heads.shape))
        return self.heads, self.copies, self.moments

    def state_dict(self) -> dict[str, Any]:
        """Heads, copies, moments, buffer, number of fits, the step, and metrics that are not reported yet."""
        arrays = {name: getattr(self, name) for name in ("heads", "copies", "moments", "buffer")}
        return arrays | {"fitted": self.fitted, "told": self._told, "now": self._now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.heads, self.copies, self.moments = state["heads"], state["copies"], state["moments"]
        self.buffer, self.fitted, self._now = state["buffer"], int(state["fitted"]), int(state["now"])
        self._told = dict(state["told"])


def values(heads: Array, before: Array, behind: Array) -> tuple[Array, Array]:
    """[2, N] Q and [2, N] V, from states [N, H] before and after each turn."""
    width = before.shape[1]
    of_v, of_q = heads[:, : width + 1], heads[:, width + 1 :]
    v = of_v[:, :-1] @ before.T + of_v[:, -1:]
    q = of_q[:, :-1] @ np.concatenate([before, behind], 1).T + of_q[:, -1:]
    return q, v


def gradient_of(heads: Array, copies: Array, turns: Array, discount: float) -> tuple[Array, tuple[float, float, float]]:
    """Gradient of the mean squared errors of Q_1, Q_2, V_1 and V_2, and the statistics of the batch.

    Args:
        heads: [2, 3 H + 2] weights to differentiate by; the targets do not depend on them.
        copies: [2, 3 H + 2] target copies, which give the targets.
        turns: [N, 3 H + 2], one turn a row: states before the turn, after it and before the next one, then the reward,
            then 1 if another turn follows, else 0.
        discount: gamma.

    Returns:
        The gradient, of the shape of `heads`, and (Q's loss and V's loss, each summed over its two heads; mean of Q).
    """
    width, count = (turns.shape[1] - 2) // 3, len(turns)
    before, behind, after = (turns[:, i * width : (i + 1) * width] for i in range(3))
    reward, goes_on = turns[:, -2], turns[:, -1]
    q, v = values(heads, before, behind)
    target_q, _ = values(copies, before, behind)
    _, next_v = values(copies, after, behind)
    gap_q, gap_v = q - (reward + discount * goes_on * next_v), v - target_q
    ones = np.ones((count, 1))
    of_v = gap_v @ np.concatenate([before, ones], 1)
    of_q = gap_q @ np.concatenate([before, behind, ones], 1)
    gradient: Array = 2 / count * np.concatenate([of_v, of_q], 1)
    return gradient, (float((gap_q**2).mean(1).sum()), float((gap_v**2).mean(1).sum()), float(q.mean()))
