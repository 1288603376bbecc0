"""Repeated attempts at one problem: a wrong answer gets a reply, until one is right or the attempts are used up.

The reward of attempt t, from what the verifier gives it, R(y_t), depends on `reward`:

    each    r_t = R(y_t)
    ufo     0.5^t - 0.5 (1 - E / T) at the end, with t from 0 and E distinct answers among T; 0.5^t only if right
    score   r_1 = R(y_1), r_2 = R(y_2) + alpha (R(y_2) - R(y_1)); always makes both attempts
    last    R(y_T) for the last attempt and 0 for those before; always makes all attempts

UFO ("Let's try again"; the source github lichengliu03/unary-feedback was read) is `attempts: 5, reward: ufo`, with a
`word` that says only that the answer is wrong. SCoRe (arXiv 2409.12917, known at second hand; alpha 10) uses `reward:
last` in its first stage, with a strong reference_kl with `first_turns: 1`, and `reward: score` in its second; there
`word` must also suit a right attempt. RLTF and refinement use `reward: each`, with {reason} in `word` for the reason
that the verifier gives. An unknown verdict ends the episode without a reward.
"""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from opd.config import Settings
from opd.tasks.environments.base import Observation
from opd.tasks.function import load_verifier
from opd.tasks.prompt import Prompt


class AgainOptions(Settings):
    """Settings of the attempts."""

    verifier: str = Field("numeric", description="Verifier that judges each attempt, given like prompts.verifier.")
    verifier_timeout: float = Field(
        10.0,
        gt=0,
        description="Seconds that the check of one attempt may take; after that its verdict is unknown and the episode "
        "ends.",
    )
    attempts: int = Field(2, ge=2, le=50, description="Maximum number of attempts at a problem.")
    reward: Literal["each", "ufo", "score", "last"] = Field(
        "each",
        description="Reward of the attempts: each by its own verdict, ufo, score (SCoRe), or last for the last one "
        "only.",
    )
    alpha: float = Field(
        10.0, ge=0, description="Factor of reward score on the gain from the first attempt to the second."
    )
    word: str = Field(
        "That is not right. Think again.",
        description="What the student reads after a wrong attempt; {reason} is replaced by the verifier's reason.",
    )

    @model_validator(mode="after")
    def _two(self) -> "AgainOptions":
        if self.reward == "score" and self.attempts != 2:
            raise ValueError(f"reward score compares two attempts, but attempts is {self.attempts}; set it to 2")
        return self


class Again:
    """Several attempts at a problem, judged by a verifier."""

    Options: ClassVar[type[Settings]] = AgainOptions

    def __init__(self, options: AgainOptions) -> None:
        self.options = options
        self._verifier = load_verifier(options.verifier, options.verifier_timeout)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode; the observation is empty, because the prompt already shows the problem."""
        self._prompt = prompt
        self._answers: list[str] = []
        self._values: list[float] = []
        return Observation("")

    def step(self, action: str) -> Observation:
        """Verify one attempt."""
        options = self.options
        verdict = self._verifier.verify(self._prompt, action)
        if not verdict.known:
            return Observation("", done=True, info={"unknown": verdict.reason})
        extract = getattr(self._verifier, "extract", None)
        self._answers.append(str((extract(self._prompt, action) if extract else None) or action.strip()))
        self._values.append(verdict.value)
        right = verdict.value >= 1.0
        # With rewards score and last all attempts are made, so a right one does not end the episode.
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
        """Stop the verifier's processes."""
        self._verifier.close()
