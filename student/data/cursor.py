"""The position of a run in its stream of training prompts; it advances once work on the prompts is complete."""

from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource


class PromptCursor:
    """Gives out the training prompts in order, each once.

    Prompts that were taken count only after `commit`, so interrupted work starts again with the same prompts. Every
    rank takes the same number, so all ranks have the same position.

    Args:
        source: the stream of prompts.

    Attributes:
        source: the stream of prompts.
        position: number of prompts taken and committed; saved with the run.
        taken: number of prompts taken since the last `commit`.
    """

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.position = 0
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        prompts = self.source.prompts("train", count, self.position + self.taken)
        self.taken += count
        return prompts

    def begin(self) -> None:
        """Return to the last `commit`, so that prompts taken since then are given out again."""
        self.taken = 0

    def commit(self) -> None:
        """Count the prompts that were taken as used."""
        self.position, self.taken = self.position + self.taken, 0
