"""HiPER's critic: values of choosing a subgoal, of pursuing it and of giving it up, for turns that mark these in tags.

    <switch>KEEP or SWITCH</switch> <subgoal>where to</subgoal> <action>what to do</action>       each turn, as prompted

The first turn and every turn that switches begin a segment; d is the number of turns of a segment, and
R_seg = sum_i gamma^i r_i is its discounted reward.

    A_low(t)  = r_t + gamma V' - V_low(t) + gamma lam_turn A_low(t + 1)   within the segment; V' = V_low(t + 1), at its
                last turn V_high(next segment) and A_low(t + 1) = 0                      on the tokens of the action
    A_high(k) = R_seg + gamma^d V_high(k + 1) - V_high(k) + gamma^d lam_segment A_high(k + 1)   on those of the subgoal,
                at turns that begin a segment
    A_term(t) = r_t + gamma r_{t+1} + ... to the segment's end + gamma^.. V_high(next) - V_term(t)     on the switch's

Values after the last turn are 0. A part includes its tags; where two parts share a token their advantages add up there,
and tokens outside all parts have credit 0. A turn without action tags has A_low on all its tokens, and a turn without a
readable switch keeps its subgoal; any text in it other than KEEP switches. V_high and V_term read the state before the
turn; V_low reads the state after the subgoal, or else after the switch, or else before the turn, passing over a tag
that ends the turn. The three heads are linear in the hidden states of the student's first weights, and each is fitted
with AdamW to A + V of its turns in the step.

Source: arXiv 2602.16165 (abstract) and the released code, JonP07/HiPER-agent (hier_gae/core_hgae.py, hier_mask.py,
read; gamma 1 and lam_segment 0.95 are its defaults; lam_turn 1 is ours, its own was not found). Differences: the code
trains a separate critic model with a clipped value loss, and its turn is a sample with a prompt of its own, not a span
of one episode. Not built: credits normalised for each kind of part and values after a truncated episode (both are in
its runs, not in its defaults), and penalties for keeping, for invalid actions and for subgoals that change, which a
reward by turn can give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd_zoo.text_spans import pieces_of
from student.data.needs import Needs
from student.plugin.traits import Traits
from student.rl.fitted import FittedSettings, TurnCritic, spans_of, turn_rewards
from student.rl.value_head import adamw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.controllers import Services

Array = NDArray[np.float64]
_TOLD = 7
"""Columns after the states: targets of V_high, V_low, V_term; begins a segment; has switch, subgoal, action tags."""


class HiperCriticSettings(FittedSettings):
    """Settings of HiPER's critic."""

    discount: float = Field(1.0, ge=0, le=1, description="gamma, by which rewards are discounted per turn.")
    lam_turn: float = Field(1.0, ge=0, le=1, description="lambda of GAE over the turns of a segment.")
    lam_segment: float = Field(0.95, ge=0, le=1, description="lambda of GAE over segments.")


@dataclass(frozen=True)
class Tagged:
    """The parts of a turn, in tokens counted from its start; None where the tags are missing."""

    switch: slice | None
    subgoal: slice | None
    action: slice | None
    switches: bool
    low: int
    """V_low reads the state before this token."""


class HiperCritic(TurnCritic[HiperCriticSettings]):
    """Value heads for subgoals, actions and switches, for advantage hiper (HiPER).

    Its state is heads, AdamW's moments, the number of AdamW steps, the step and open metrics.
    """

    evidence: ClassVar[str] = "abstract"
    traits = Traits(works_ahead=True, gives=("hiper_values",), why={"gives": "use advantage hiper"})

    def __init__(self, settings: HiperCriticSettings) -> None:
        super().__init__(settings)
        self._turns: list[tuple[tuple[Any, ...], Array]] = []
        self.heads: Array | None = None  # [3, H + 1]: rows V_high, V_low, V_term; the bias last
        self.moments: Array | None = None
        self.moved = 0

    def needs(self) -> Needs:
        """Hidden states under the student's first weights, read in process, and rewards."""
        return Needs(reward="any", models=frozenset({"initial"}))

    def compose(self, rows: list[Row]) -> list[Row]:
        """Find the parts of each turn and write their advantages on their tokens; credit 0 without a reward."""
        self._turns = []
        for row, hidden in self.states(rows):
            credit = np.zeros(row.length, np.float64)
            self.write(row, credit)
            if (rewarded := turn_rewards(row)) is None:
                continue
            key, rewards = rewarded
            spans = spans_of(row)
            tagged = [tagged_of(pieces_of(row.response_ids[a:b], self.services.tokenizer)) for a, b in spans]
            starts = hidden[[start for start, _ in spans]]
            lows = hidden[[start + turn.low for (start, _), turn in zip(spans, tagged, strict=True)]]
            begins = np.array([not place or turn.switches for place, turn in enumerate(tagged)])
            values = self.values(starts, lows)
            credits = advantages(rewards, begins, values, self.settings)
            for (start, end), turn, begin, (high, low, term) in zip(spans, tagged, begins, credits.T, strict=True):
                own = credit[start:end]
                own[turn.action or slice(None)] += low
                own[turn.subgoal or slice(0)] += high * begin
                own[turn.switch or slice(0)] += term
            self.write(row, credit)
            seen = [(turn.switch is not None, turn.subgoal is not None, turn.action is not None) for turn in tagged]
            targets = (credits + values).T
            self._turns.append((key, np.concatenate([starts, lows, targets, begins[:, None], seen], 1)))
        return rows

    def values(self, starts: Array, lows: Array) -> Array:
        """[3, turns] V_high, V_low and V_term from states [turns, H]; zeros before the first fit."""
        if self.heads is None:
            return np.zeros((3, len(starts)))
        weights, bias = self.heads[:, :-1], self.heads[:, -1]
        return np.stack([x @ weights[kind] + bias[kind] for kind, x in enumerate((starts, lows, starts))])

    def fit(self, services: Services) -> dict[str, float]:
        """Fit each head to its targets in the turns of all ranks; returns the metrics for `after_update`."""
        mine, self._turns = self._turns, []
        episodes = self.in_order(mine, services)
        if not episodes:
            return {}
        turns = np.concatenate(episodes)
        width = (turns.shape[1] - _TOLD) // 2
        starts, lows, told = turns[:, :width], turns[:, width : 2 * width], turns[:, 2 * width :]
        begins = told[:, 3] == 1
        parts = ((starts[begins], told[begins, 0]), (lows, told[:, 1]), (starts, told[:, 2]))
        data = [(np.concatenate([x, np.ones((len(x), 1))], 1), targets) for x, targets in parts]
        heads = np.zeros((3, width + 1)) if self.heads is None else self.heads
        moments = np.zeros((2, 3, width + 1)) if self.moments is None else self.moments
        moved, loss = self.moved, 0.0
        # Every rank has the same turns in the same order and takes the same float64 steps, so the heads stay equal.
        for number in range(self.settings.fits):
            gaps = [x @ head - targets for head, (x, targets) in zip(heads, data, strict=True)]
            loss = sum(float((gap**2).mean()) for gap in gaps) if number == 0 else loss
            gradient = np.stack([2 * gap @ x / len(gap) for gap, (x, _) in zip(gaps, data, strict=True)])
            moved += 1
            heads, moments = adamw(heads, moments, gradient, moved, self.settings.learning_rate)
        self.heads, self.moments, self.moved = heads, moments, moved
        return {
            "hiper/warm_up": float(self.warming_up),
            "hiper/loss": loss,
            "hiper/segments": float(begins.sum() / len(episodes)),
            "hiper/switch_tags": float(told[:, 4].mean()),
            "hiper/subgoal_tags": float(told[begins, 5].mean()),
            "hiper/action_tags": float(told[:, 6].mean()),
        }

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics hiper/warm_up, hiper/loss, hiper/segments, and hiper/switch_tags, /subgoal_tags and /action_tags.

        hiper/loss is the sum of the three mean squared errors before the step's fit, and hiper/segments the mean number
        of segments per episode. The last three are shares of turns with readable tags; hiper/subgoal_tags is of the
        turns that begin a segment. Where they are 0 there is no hierarchy to give credit by.
        """
        return super().after_update(step, services)

    def state_dict(self) -> dict[str, Any]:
        """Heads, moments, the number of AdamW steps, the step, and metrics that are not reported yet."""
        arrays = {"heads": self.heads, "moments": self.moments}
        return arrays | {"moved": self.moved, "told": self._told, "now": self._now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.heads, self.moments, self.moved = state["heads"], state["moments"], int(state["moved"])
        self._told, self._now = dict(state["told"]), int(state["now"])


def advantages(rewards: Array, begins: NDArray[np.bool_], values: Array, settings: HiperCriticSettings) -> Array:
    """[3, turns] A_high (0 where no segment begins), A_low and A_term of one episode, by the module's formulas.

    Args:
        rewards: [turns] rewards.
        begins: [turns] whether a segment begins at the turn; must be true for the first one.
        values: [3, turns] V_high, V_low and V_term.
        settings: gamma and the two lambdas.
    """
    gamma = settings.discount
    high, low, term = values
    found = np.zeros_like(values)
    # V_high and A_high of the next segment; reward and number of turns from turn t to the end of this segment.
    next_value, next_high, earned, turns = 0.0, 0.0, 0.0, 0
    target, later = next_value, 0.0
    for t in reversed(range(len(rewards))):
        earned, turns = rewards[t] + gamma * earned, turns + 1
        found[1, t] = later = rewards[t] + gamma * target - low[t] + gamma * settings.lam_turn * later
        found[2, t] = earned + gamma**turns * next_value - term[t]
        target = low[t]
        if begins[t]:
            ahead = gamma**turns * (next_value + settings.lam_segment * next_high)
            found[0, t] = next_high = earned + ahead - high[t]
            next_value, earned, turns = high[t], 0.0, 0
            target, later = next_value, 0.0
    # A_high is left 0 at the other turns: V_high is defined only where a segment begins.
    return found


def tagged_of(pieces: Sequence[str]) -> Tagged:
    """The parts of a turn, from the text of each of its tokens; of repeated tags the first pair counts."""
    text, stops = "".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=int)
    places = {name: _find(text, name) for name in ("switch", "subgoal", "action")}

    def tokens(name: str) -> slice | None:
        found = places[name]
        # All tokens that hold at least one of its characters.
        return None if found is None else slice(_after(stops, found[0]), _after(stops, found[1] - 1) + 1)

    switch, subgoal = tokens("switch"), tokens("subgoal")
    said = "" if places["switch"] is None else text[slice(*places["switch"])][len("<switch>") : -len("</switch>")]
    ends = [part.stop for part in (subgoal, switch) if part is not None and part.stop < len(pieces)]
    switches = said.strip().upper() not in ("", "KEEP")
    return Tagged(switch, subgoal, tokens("action"), switches, ends[0] if ends else 0)


def _find(text: str, name: str) -> tuple[int, int] | None:
    """Start and end of the first <name>...</name> in characters, tags included."""
    start = text.find(f"<{name}>")
    stop = text.find(f"</{name}>", start) if start >= 0 else -1
    return None if stop < 0 else (start, stop + len(f"</{name}>"))


def _after(stops: NDArray[np.int64], place: int) -> int:
    """Index of the token that holds the character at `place`; `stops` are the tokens' ends in characters."""
    return int(np.searchsorted(stops, place, side="right"))
