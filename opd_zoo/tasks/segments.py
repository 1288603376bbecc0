"""RLPT: unlabelled text as problems: predict the segment that follows, or one in the middle, judged by its meaning.

    next      the segments so far       ->   the next one                            share 1 - middle
    middle    those before and after    ->   the one in between                      share middle

A judge is asked whether what was predicted says what the text says, or the beginning of it, and pays 1 or 0; it sees
the text's own segment, the student never does before it answers. Segments are paragraphs or lines, whatever `mark`
divides. Texts come from a .jsonl file, one {"text": ...} a line; a text's segments stay on one side of the held-out
split. Source: RLPT, arXiv 2509.19249 (by an extract: both problems, a prefix reward by a generative judge; the words
are ours).
"""

import json
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError
from opd.tasks.chat import ChatClient, ChatFailed, ChatSettings
from opd.tasks.judges import filled
from opd.tasks.prompt import Prompt
from opd.tasks.source import Labels
from opd.tasks.verdict import Verdict
from opd_zoo.asking import word_of

_HELDOUT = 8
"""One text in this many is held out."""


class SegmentsOptions(Settings):
    """Which texts, how they are divided, and who judges."""

    file: Path = Field(description='A .jsonl file, each line with a "text".')
    judge: ChatSettings = Field(description="Chat model that compares meanings: its endpoint and model.")
    mark: str = Field("\n\n", min_length=1, description="Text that divides segments.")
    before: int = Field(4, ge=1, description="Maximum number of segments shown before the one to predict.")
    middle: float = Field(0.5, ge=0, le=1, description="Share of problems that also show the segment after it.")
    next_text: str = Field(
        "{before}\n\nWrite the next paragraph.\n", description="Prompt for the next segment, made of {before}."
    )
    middle_text: str = Field(
        "{before}\n\n[missing]\n\n{after}\n\nWrite the missing paragraph.\n",
        description="Prompt for a segment in the middle, made of {before} and {after}.",
    )
    question: str = Field(
        "Text:\n{reference}\n\nPrediction:\n{answer}\n\nDoes the prediction say the same as the text, or as the "
        "beginning of it? End with yes or no.",
        description="What the judge is asked, made of {reference} and {answer}.",
    )


class Segments:
    """Segments of unlabelled text to predict, judged by their meaning (RLPT).

    `Prompt.extra` holds the kind of problem and the number of the text.
    """

    Options: ClassVar[type[Settings]] = SegmentsOptions
    domain = "segments"

    def __init__(self, options: SegmentsOptions) -> None:
        self.options = options
        self.client = ChatClient(options.judge)

    @cached_property
    def texts(self) -> list[list[str]]:
        """The segments of each text that has at least two.

        Raises:
            ConfigError: if the file cannot be read, or has too few texts for two splits.
        """
        path = self.options.file
        try:
            lines: list[Any] = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
            parts = [[part.strip() for part in line["text"].split(self.options.mark) if part.strip()] for line in lines]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path} cannot be read as texts ({type(error).__name__}: {error}); each line must be {{"text": ...}}.'
            ) from error
        found = [part for part in parts if len(part) > 1]
        if len(found) < 2:
            raise ConfigError(f"{path} has {len(found)} texts of two segments or more; task segments needs two.")
        return found

    def draw_from(self, random: Random, split: Literal["train", "heldout"]) -> Prompt:
        """Draw a problem of a split."""
        o, count = self.options, len(self.texts)
        held = [number for number in range(count) if number % min(count, _HELDOUT) == 0]
        number = random.choice(held if split == "heldout" else [one for one in range(count) if one not in held])
        parts = self.texts[number]
        place = random.randrange(1, len(parts))
        before = o.mark.join(parts[max(0, place - o.before) : place])
        middle = place + 1 < len(parts) and random.random() < o.middle
        values = {"before": before, "after": parts[place + 1] if middle else ""}
        text = o.middle_text if middle else o.next_text
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value, 1)
        extra = {"form": "middle" if middle else "next", "text": number}
        return Prompt.make(text, answer=parts[place], domain=self.domain, extra=extra)

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Ask the judge; without a clear word the verdict is unknown."""
        if not completion.strip():
            return Verdict.of(False, "nothing was predicted")
        try:
            word = word_of(self.client, filled(self.options.question, prompt, completion), ("yes", "no"))
        except ChatFailed as error:
            return Verdict.unknown(str(error))
        return (
            Verdict.unknown("the judge gave no clear word") if word is None else Verdict.of(word == "yes", "not that")
        )

    def labels(self) -> Labels:
        """All problems have the domain of the task and no teacher."""
        return frozenset({(None, self.domain)})

    def close(self) -> None:
        """Nothing to release."""
