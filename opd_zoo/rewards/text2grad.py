"""Text2Grad: a judge quotes what is good and bad in an answer, and the quoted tokens are rewarded.

    r_t = +weight for the tokens of a span that is quoted as good, -weight as bad;   the rest 0

The judge answers with JSON, {"good": ["span", ...], "bad": [...]}. A span that does not occur in the answer is skipped
and counted in text2grad/unmatched; without a readable answer of the judge the reward is unknown. The row's other
rewards count at its last token. Advantage gae sums the rewards. The paper's penalty is reward kl_penalty with beta 0.2;
the paper adapts beta towards a KL of 6, which is not built here. The authors train a judge of their own that marks
words. Source: the released code of arXiv 2505.22338, microsoft/Text2Grad; the question is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from opd.tasks.chat import object_in
from opd.tasks.judges import filled
from opd_zoo.asked_chat import AskedChat, AskedChatSettings
from opd_zoo.text_spans import pieces_of, tokens_of
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from opd.tasks.prompt import Prompt
    from student.data.row import Row
    from student.scoring.rewards.base import RewardServices

_SIGNS = {"good": 1.0, "bad": -1.0}


class Text2GradSettings(AskedChatSettings):
    """Settings of Text2Grad."""

    question: str = Field(
        "Question:\n{prompt}\n\nAnswer:\n{answer}\n\nQuote, word for word, the parts of the answer that are good and "
        'those that are bad. Answer with JSON alone: {"good": ["..."], "bad": ["..."]}',
        description="What the judge is asked, made of {prompt}, {answer} and {reference}.",
    )


class Text2Grad(AskedChat[Text2GradSettings]):
    """Per token: parts that a judge quotes as good or bad (Text2Grad)."""

    evidence = "text and code"
    traits = Traits(gives=("token_rewards",))

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Add to the rewards by token; metrics unknown (rows) and unmatched (spans)."""
        for row, spans in zip(rows, self.told(rows, lambda row: self.spans(row.prompt, row.text)), strict=True):
            self.fire("unknown", float(spans is None))
            if not self.settings.adds:
                row.reward = None if spans is None else 0.0
            if spans is not None:
                found = self.tokens(pieces_of(row.response_ids, services.tokenizer), spans)
                found[~row.loss_mask] = 0.0
                row.token_rewards = found if row.token_rewards is None else row.token_rewards + found

    def spans(self, prompt: Prompt, answer: str) -> list[tuple[str, float]] | None:
        """Quoted spans with their signs; None if the judge's answer cannot be read."""
        question = filled(self.settings.question, prompt, answer)
        said = object_in(self.client.ask([{"role": "user", "content": question}]))
        if said is None:
            return None
        quoted = {name: said.get(name) or [] for name in _SIGNS}
        # A string in place of a list would be read character by character, and a number would raise.
        if not all(isinstance(spans, list) for spans in quoted.values()):
            return None
        return [(str(span), sign) for name, sign in _SIGNS.items() for span in quoted[name]]

    def tokens(self, pieces: Sequence[str], spans: Sequence[tuple[str, float]]) -> NDArray[np.float32]:
        """[T] float32 reward of each token; overlapping spans add up."""
        found = np.zeros(len(pieces), np.float32)
        for span, sign in spans:
            places = tokens_of(pieces, span)
            self.fire("unmatched", float(not places))
            found[places.start : places.stop] += np.float32(sign * self.settings.weight)
        return found
