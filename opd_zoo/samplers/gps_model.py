"""GPS' model: predicts success rates of prompts from their features and a latent of the policy's present ability."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from student.data.streams import stream

_LATENT, _HIDDEN = 8, 64


class GpsModel:
    """Encoder, recurrent prior and decoder with their optimizer; float32 on the CPU, the same on every rank.

    Args:
        width: D, the width of a prompt's features.
        seed: decides the first weights and all draws.
        learning_rate: of Adam.
    """

    def __init__(self, width: int, seed: int, learning_rate: float) -> None:
        self._seed = seed
        # A forked generator, so that the run's own, which dropout uses and a checkpoint holds, does not move.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.ModuleDict(
                {
                    "encoder": nn.Sequential(nn.Linear(width + 1, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN)),
                    "posterior": nn.Linear(_HIDDEN, 2 * _LATENT),
                    "recurrent": nn.GRUCell(_LATENT, _HIDDEN),
                    "prior": nn.Linear(_HIDDEN, 2 * _LATENT),
                    "decoder": nn.Sequential(
                        nn.Linear(width + _LATENT, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, 1), nn.Flatten(0)
                    ),
                }
            )
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=learning_rate)
        self.memory = torch.zeros(1, _HIDDEN)

    @torch.no_grad()
    def predict(self, features: NDArray[np.float32], draws: int, seed: int) -> NDArray[np.float64]:
        """[N] mean success rates of prompts with features [N, D], over draws from the prior of the coming step."""
        mean, width = self._prior()
        noise = torch.from_numpy(_noise(seed, "predict", draws))
        total = sum(self._decode(torch.from_numpy(features), mean + width * draw).sigmoid() for draw in noise)
        assert isinstance(total, Tensor)  # there is at least one draw
        return (total / draws).double().numpy()

    def fit(self, features: NDArray[np.float32], rates: NDArray[np.float32], steps: int, *, seed: int) -> float:
        """Take `steps` steps of Adam on the negative evidence lower bound, then advance the recurrent memory.

        Args:
            features: [N, D] of the step's prompts.
            rates: [N] their success rates.
            steps: of Adam.
            seed: of the draws.

        Returns:
            The last negative bound, nats.
        """
        x, y = torch.from_numpy(features), torch.from_numpy(rates)
        noise = torch.from_numpy(_noise(self._seed, f"fit/{seed}", steps))
        loss = torch.zeros(())
        for draw in noise:
            mean, width = self._posterior(x, y)
            loss = functional.binary_cross_entropy_with_logits(self._decode(x, mean + width * draw), y, reduction="sum")
            loss = loss + _kl(mean, width, *self._prior())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        with torch.no_grad():
            mean, _ = self._posterior(x, y)
            self.memory = self.net["recurrent"](mean[None], self.memory)
        return float(loss.detach())

    def _decode(self, features: Tensor, latent: Tensor) -> Tensor:
        logits: Tensor = self.net["decoder"](torch.cat([features, latent.expand(len(features), -1)], 1))
        return logits

    def _posterior(self, features: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.net["encoder"](torch.cat([features, rates[:, None]], 1)).mean(0)
        return _gaussian(self.net["posterior"](pooled))

    def _prior(self) -> tuple[Tensor, Tensor]:
        return _gaussian(self.net["prior"](self.memory)[0])

    def state_dict(self) -> dict[str, Any]:
        """Weights, Adam's moments and memory."""
        moments = {str(i): dict(value) for i, value in self.optimizer.state_dict()["state"].items()}
        return {"net": dict(self.net.state_dict()), "moments": moments, "memory": self.memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.net.load_state_dict(state["net"])
        whole = self.optimizer.state_dict()
        whole["state"] = {int(i): dict(value) for i, value in state["moments"].items()}
        self.optimizer.load_state_dict(whole)
        self.memory = state["memory"].clone()


def _gaussian(numbers: Tensor) -> tuple[Tensor, Tensor]:
    mean, raw = numbers.chunk(2)
    return mean, functional.softplus(raw) + 1e-3


def _kl(mean: Tensor, width: Tensor, other_mean: Tensor, other_width: Tensor) -> Tensor:
    ratio = (width / other_width).square()
    return 0.5 * (ratio + ((mean - other_mean) / other_width).square() - 1.0 - ratio.log()).sum()


def _noise(seed: int, name: str, count: int) -> NDArray[np.float32]:
    return stream(seed, "gps", name).standard_normal((count, _LATENT)).astype(np.float32)
