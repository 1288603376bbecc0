"""Where a run is in its stream of training prompts: one number, which moves when work on the prompts is complete."""

from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource


class PromptCursor:
    """Gives the next training prompts, each once.

    What is taken counts only after `commit`: work that was interrupted begins again with the same prompts. Every rank
    takes equally many, so all stand at the same place.

    Args:
        source: the stream.

    Attributes:
        position: prompts taken for good; saved with the run.
        taken: prompts taken since the last `commit`.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        self.position = 0
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        prompts = self._source.prompts("train", count, self.position + self.taken)
        self.taken += count
        return prompts

    def begin(self) -> None:
        """Start over from the last `commit`: what was taken since then is given out again."""
        self.taken = 0

    def commit(self) -> None:
        """Count what was taken as used."""
        self.position, self.taken = self.position + self.taken, 0
