"""Controllers for the training of tiny worlds: errors in given answers, and an end at a wanted accuracy.

A model that has seen only correct scratch work is a poor teacher: after a student's wrong prefix, its probabilities are
noise. So `Noise` replaces some of an answer's tokens by random digits. These are left out of the loss, and all other
targets stay right, which teaches the model to continue correctly after an error.
"""

from typing import Any

import numpy as np
from pydantic import Field

from opd.tasks.prompt import Prompt
from student.data.row import Row
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings, Services


class NoiseSettings(ControllerSettings):
    """Settings of `Noise`."""

    share: float = Field(0.1, gt=0, le=1, description="Probability that a token of a chosen row is replaced.")
    rows: float = Field(0.5, gt=0, le=1, description="Probability that a row is chosen.")
    seed: int = Field(0, ge=0, description="Seed of the choice of rows and tokens and of the replacements.")


class Noise(Controller[NoiseSettings]):
    """Replaces random tokens of given answers by random digits, which are left out of the loss."""

    def __init__(self, settings: NoiseSettings) -> None:
        super().__init__(settings)
        self._digits = np.zeros(0, np.uint32)

    def start(self, services: Services) -> None:
        """Look up the ids of the digits."""
        ids = services.tokenizer("0123456789", add_special_tokens=False)["input_ids"]
        self._digits = np.array(ids, dtype=np.uint32)

    def compose(self, rows: list[Row]) -> list[Row]:
        """Put errors into a random share of the given rows, which depends only on the settings and the rows' keys."""
        return [self._corrupt(row) if row.origin == "expert" else row for row in rows]

    def _corrupt(self, row: Row) -> Row:
        random = stream(self.settings.seed, "noise", row.key.step, row.key.uid, row.key.sample)
        if random.random() >= self.settings.rows:
            return row
        chosen = random.random(row.length) < self.settings.share
        drawn = self._digits[random.integers(len(self._digits), size=row.length)]
        ids = np.where(chosen, drawn, row.response_ids).astype(np.uint32)
        # A replacement that happens to equal the original token is not an error and stays in the loss.
        row.loss_mask = row.loss_mask & (ids == row.response_ids)
        row.response_ids = ids
        return row

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Return metric noise_share: the share of given tokens that were left out of the loss."""
        given = [outcome for outcome in services.outcomes if outcome.origin == "expert"]
        length = sum(outcome.length for outcome in given)
        return {"noise_share": 1.0 - sum(outcome.tokens for outcome in given) / length} if length else {}


class UntilSettings(ControllerSettings):
    """Settings of `Until`."""

    accuracy: float = Field(gt=0, le=1, description="Accuracy of greedy answers (fraction) at which the run ends.")
    prompts: int = Field(128, ge=1, description="Number of training prompts that are answered to measure it.")
    every: int = Field(20, ge=1, description="Steps between two measurements.")


class Until(Controller[UntilSettings]):
    """Ends the run when greedy answers reach a wanted accuracy, so that a student has the same level with every seed.

    It is measured on training prompts, so that held-out ones have no effect on training.
    """

    def __init__(self, settings: UntilSettings) -> None:
        super().__init__(settings)
        self._reached = False
        self._prompts: list[Prompt] = []

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Measure the accuracy every `every` steps; returns metric until_accuracy in these."""
        if (step + 1) % self.settings.every:
            return {}
        # Drawn once, so that every measurement uses the same prompts.
        self._prompts = self._prompts or services.training_prompts(self.settings.prompts, seed_names=("until",))
        found = services.evaluate(self._prompts, seed_names=("until",), temperature=0.0)
        self._reached = found.accuracy >= self.settings.accuracy
        return {"until_accuracy": found.accuracy}

    def finished(self) -> bool:
        """Whether the level is reached."""
        return self._reached

    def state_dict(self) -> dict[str, Any]:
        """Whether the level is reached."""
        return {"reached": self._reached}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._reached = bool(state["reached"])
