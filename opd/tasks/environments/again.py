"""Another attempt: a problem whose wrong answers are met with a word, until one is right or attempts are used up.

    each    r_t = R(y_t), what the verifier gives attempt t
    ufo     0.5^t - 0.5 (1 - E / T) at the end, t from 0; E different answers among T; without a right one 0 - ...
    score   r_1 = R(y_1), r_2 = R(y_2) + alpha (R(y_2) - R(y_1)); both attempts are always made
    last    R(y_T) for the last attempt and 0 for those before; all attempts are always made

UFO ("Let's try again", github lichengliu03/unary-feedback, read): `attempts: 5, reward: ufo`, and the word says nothing
but that the answer is wrong. SCoRe (arXiv 2409.12917, at second hand; alpha 10): `reward: last` in its first stage,
beside a strong reference_kl with `first_turns: 1`, and `reward: score` in the second; the word must fit a right attempt
too. RLTF and refinement: `reward: each`, with {reason} in `word` for what the verifier says. A verdict that is unknown
ends the episode without one.
"""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from opd.config import Settings
from opd.tasks.environments.base import Observation
from opd.tasks.function import load_verifier
from opd.tasks.prompt import Prompt


class AgainOptions(Settings):
    """Settings of the attempts."""

    verifier: str = Field(
        "numeric", description="Judges each attempt, as prompts.verifier does: a name or module:attribute."
    )
    verifier_timeout: float = Field(10.0, gt=0, description="Seconds after which a check counts as unknown.")
    attempts: int = Field(2, ge=2, le=50, description="Most attempts.")
    reward: Literal["each", "ufo", "score", "last"] = Field(
        "each", description="What attempts are paid; see the module."
    )
    alpha: float = Field(10.0, ge=0, description="Of reward score, for the step from one attempt to the next.")
    word: str = Field(
        "That is not right. Think again.", description="Said of a wrong attempt; {reason} is what the verifier says."
    )

    @model_validator(mode="after")
    def _two(self) -> "AgainOptions":
        if self.reward == "score" and self.attempts != 2:
            raise ValueError(f"reward score compares two attempts, but attempts is {self.attempts}; set it to 2")
        return self


class Again:
    """The environment."""

    Options: ClassVar[type[Settings]] = AgainOptions

    def __init__(self, options: AgainOptions) -> None:
        self.options = options
        self._verifier = load_verifier(options.verifier, options.verifier_timeout)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Nothing is shown but the problem."""
        self._prompt = prompt
        self._answers: list[str] = []
        self._values: list[float] = []
        return Observation("")

    def step(self, action: str) -> Observation:
        """Judge an attempt."""
        options = self.options
        verdict = self._verifier.verify(self._prompt, action)
        if not verdict.known:
            return Observation("", done=True, info={"unknown": verdict.reason})
        extract = getattr(self._verifier, "extract", None)
        self._answers.append(str((extract(self._prompt, action) if extract else None) or action.strip()))
        self._values.append(verdict.value)
        right = verdict.value >= 1.0
        # Where both attempts are paid by their difference, a right one does not end the episode.
        done = len(self._values) == options.attempts or (right and options.reward not in ("score", "last"))
        return Observation(
            "" if done else options.word.replace("{reason}", verdict.reason),
            reward=self._reward(right, done),
            done=done,
            success=right if done else None,
            info={"attempts": len(self._values)},
        )

    def _reward(self, right: bool, done: bool) -> float:
        kind, values = self.options.reward, self._values
        if kind == "ufo":
            if not done:
                return 0.0
            repeated = 1 - len(set(self._answers)) / len(self._answers)
            return (0.5 ** (len(values) - 1) if right else 0.0) - 0.5 * repeated
        if kind == "last":
            return values[-1] if done else 0.0
        gained = values[-1] - values[-2] if kind == "score" and len(values) > 1 else 0.0
        return values[-1] + self.options.alpha * gained

    def close(self) -> None:
        """End the verifier's processes."""
        self._verifier.close()
