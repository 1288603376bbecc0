"""Router-R1: the student thinks, asks one of several models, reads what it says, and answers.

    <ask>NAME: question</ask>   ->   <said>what model NAME answers</said>
    <answer>...</answer>        ->   the end
    reward   -1 for a turn that is neither, which ends the episode
             (1 - alpha) R + alpha c  if R > 0, else 0;   R the verifier's value,  c = 1 - spent / most

`spent` is the price of the models that were asked, `most` that of asking the dearest one in every turn. A model that
does not answer is said to be unavailable, and costs nothing. The last turn must answer. Source: the released code of
Router-R1, arXiv 2506.09033, ulab-uiuc/Router-R1 (by notes on it; alpha 0 by default). There, costs are ranked within a
buffer of earlier ones; here they are shares of the largest possible cost, which needs no memory.
"""

import re
from typing import ClassVar

from pydantic import Field

from opd.config import Settings
from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.environments.base import Observation
from opd.tasks.function import load_verifier
from opd.tasks.prompt import Prompt

_ASK = re.compile(r"<ask>\s*([^:<]+?)\s*:\s*(.+?)\s*</ask>\s*$", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>\s*$", re.DOTALL)


class Routed(ChatSettings):
    """A model that may be asked."""

    price: float = Field(1.0, ge=0, description="Price of one answer of the model, in any unit.")


class RouterOptions(Settings):
    """Which models, and how the answer is judged."""

    models: dict[str, Routed] = Field(min_length=1, description="Models by the names that the student uses.")
    turns: int = Field(4, ge=2, le=50, description="Maximum number of turns, the answer among them.")
    alpha: float = Field(0.0, ge=0, lt=1, description="Weight of the saved cost in the reward of a right answer.")
    verifier: str = Field("numeric", description="Verifier that judges the answer, given like prompts.verifier.")
    verifier_timeout: float = Field(
        10.0, gt=0, description="Seconds that the check of an answer may take; after that its verdict is unknown."
    )
    intro: str = Field(
        "\nAsk a model with <ask>NAME: question</ask>, or answer with <answer>...</answer>. Models: {models}.\n",
        description="What is read before the first turn, made of {models}.",
    )


class Router:
    """Named models to ask before answering, with their price in the reward (Router-R1)."""

    Options: ClassVar[type[Settings]] = RouterOptions

    def __init__(self, options: RouterOptions) -> None:
        self.options = options
        self._clients = {name: ChatClient(model) for name, model in options.models.items()}
        self._verifier = load_verifier(options.verifier, options.verifier_timeout)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begin an episode: which models there are."""
        self._prompt, self._turn, self._spent = prompt, 0, 0.0
        return Observation(self.options.intro.replace("{models}", ", ".join(self.options.models)))

    def step(self, action: str) -> Observation:
        """Ask a model, or answer."""
        self._turn += 1
        if answer := _ANSWER.search(action):
            return self._judged(answer[1])
        asked = _ASK.search(action)
        if asked is None or asked[1] not in self._clients or self._turn == self.options.turns:
            return Observation("", reward=-1.0, done=True, success=False, info={"bad_calls": 1})
        try:
            said = self._clients[asked[1]].ask([{"role": "user", "content": asked[2]}])
            self._spent += self.options.models[asked[1]].price
        except ChatFailed:
            said = f"{asked[1]} is unavailable."
        return Observation(f"\n<said>{said}</said>\n", info={"measures": {"spent": self._spent}})

    def _judged(self, answer: str) -> Observation:
        verdict = self._verifier.verify(self._prompt, answer)
        if not verdict.known:
            return Observation("", done=True, info={"unknown": verdict.reason})
        most = (self.options.turns - 1) * max(model.price for model in self.options.models.values())
        saved = 1.0 - self._spent / most if most else 1.0
        value, alpha = verdict.value, self.options.alpha
        reward = (1.0 - alpha) * value + alpha * saved if value else 0.0
        measures = {"spent": self._spent, "saved": saved}
        return Observation("", reward=reward, done=True, success=value >= 1.0, info={"measures": measures})

    def close(self) -> None:
        """Stop the verifier's processes."""
        self._verifier.close()
