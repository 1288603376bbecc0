"""G2RL: an answer is worth more the less its gradient points where those of its group's good answers point.

    phi_i    mean over the tokens of W^T (onehot(y_t) - p_t), of length 1: the direction of d log pi(y_i) / d h
    w_ij     exp(r_j) over the sum for all j but i,   r = 2 reward - 1
    v_i      max(1 - sum over j of w_ij (phi_i . phi_j)^2, 0), scaled to [0, 1] over the group
    reward   (r~ + 1) / 2,   r~ = r (1 + strength v_i), cut to [-3, 3]

W is the student's output head and h its last hidden state. Rewards are expected in [0, 1]; the part `g2rl` carries the
difference. Right answers in new directions gain, and wrong ones in new directions lose. Only forward passes are needed,
one of all answers. Strategies that choose by rewards do so before. Source: arXiv 2512.15687 (text; the strength was not
found, and 1 is ours).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.wire.types import PayloadSpec
from student.data.needs import STUDENT, Needs
from student.data.outcome import reward_of
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from opd.heads import OutputHead
    from student.data.row import Row
    from student.plugin.controllers import Services

_NOVELTY, _LARGEST, _TOKENS = "g2rl/novelty", 3.0, 256


class G2rlSettings(ControllerSettings):
    """Settings of G2RL."""

    strength: float = Field(1.0, gt=0, description="How much more the newest direction of a group is worth.")


class G2rl(Controller[G2rlSettings]):
    """Rewards answers whose gradients point elsewhere than those of their group (G2RL)."""

    evidence: ClassVar[str] = "text"
    traits = Traits(least_group=2, why={"least_group": "compares the directions of a group's answers"})

    def needs(self) -> Needs:
        """Rewards, and the student, which reads its own answers."""
        return Needs(reward="any", models=frozenset({STUDENT}))

    def start(self, services: Services) -> None:
        """Keep the weights, of which the head is read."""
        self._student = services.workbench().learner.student

    def compose(self, rows: list[Row]) -> list[Row]:
        """Add the part of each answer that the student sampled and whose reward is known."""
        able = [row for row in rows if row.on_policy and row.loss_mask.any() and reward_of(row) is not None]
        # On every rank, also without answers: a sharded student is read and its head gathered together.
        scores, head = self.services.read(able, PayloadSpec.hidden("f32")), self._student.head()
        groups: dict[str, list[tuple[Row, NDArray[np.float64]]]] = {}
        for row, found in zip(able, scores, strict=True):
            hidden = np.asarray(found.hidden, np.float32)[row.loss_mask]
            groups.setdefault(row.key.group, []).append((row, direction(hidden, row.response_ids[row.loss_mask], head)))
        for group in groups.values():
            rewards = [reward_of(row) or 0.0 for row, _ in group]
            values = novelty(np.stack([phi for _, phi in group]), 2.0 * np.array(rewards) - 1.0)
            for (row, _), reward, value in zip(group, rewards, values, strict=True):
                shaped = (2.0 * reward - 1.0) * (1.0 + self.settings.strength * float(value))
                row.reward_parts[self.label] = (float(np.clip(shaped, -_LARGEST, _LARGEST)) + 1.0) / 2.0 - reward
                row.notes[_NOVELTY] = float(value)
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric g2rl/novelty, the mean of v."""
        found = [outcome.notes[_NOVELTY] for outcome in services.outcomes if _NOVELTY in outcome.notes]
        return {_NOVELTY: sum(found) / len(found)} if found else {}


def direction(hidden: NDArray[np.float32], ids: NDArray[np.uint32], head: OutputHead) -> NDArray[np.float64]:
    """[H] phi of the module's formula, from the hidden states [T, H] that predict the tokens [T]."""
    import torch

    total = np.zeros(hidden.shape[1])
    with torch.no_grad():
        weight = head.weight[: head.vocab_size]
        for start in range(0, len(ids), _TOKENS):
            states = torch.from_numpy(hidden[start : start + _TOKENS]).to(weight.device)
            given = torch.from_numpy(ids[start : start + _TOKENS].astype(np.int64)).to(weight.device)
            expected = head.logits(states).softmax(-1).to(weight.dtype) @ weight
            total += (weight[given] - expected).double().sum(0).cpu().numpy()
    length = float(np.linalg.norm(total))
    return total / length if length else total


def novelty(phi: NDArray[np.float64], rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] v of each answer, scaled to [0, 1], from the directions [n, H] and the rewards [n]; 0 where all are equal."""
    values = raw_novelty(phi, rewards)
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high - low > 1e-12 else np.zeros_like(values)


def raw_novelty(phi: NDArray[np.float64], rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] v of each answer before it is scaled."""
    if len(phi) < 2:
        return np.zeros(len(phi))
    likeness = (phi @ phi.T) ** 2
    weights = np.exp(rewards - rewards.max())[None, :] * (1.0 - np.eye(len(phi)))
    found: NDArray[np.float64] = np.maximum(1.0 - (weights * likeness).sum(1) / weights.sum(1), 0.0)
    return found
