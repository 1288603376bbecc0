"""The one interface of all prompt sources.

A source is an indexable stream: the i-th training prompt depends on the settings, the seed and i alone, so a run
resumes by remembering one number. Held-out prompts never occur in training, by construction.
"""

from typing import Literal, Protocol, runtime_checkable

from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict

Split = Literal["train", "heldout"]
Labels = frozenset[tuple[str | None, str | None]]
"""Pairs of (teacher, domain)."""


@runtime_checkable
class PromptSource(Protocol):
    """A deterministic stream of prompts with the verifier of their answers."""

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        """`count` prompts of a split from position `start` on.

        The training stream is endless (tables are reshuffled every epoch); held-out prompts are distinct.

        Raises:
            DataError: when the held-out split has fewer than `start + count` distinct prompts.
        """
        ...

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge a completion of one of this source's prompts; unknown where that is not possible, never raises."""
        ...

    def labels(self) -> Labels | None:
        """Every pair (teacher, domain) that a prompt of either split can carry; None where that is not known.

        It decides before the first step whether every prompt has a teacher.
        """
        ...

    def close(self) -> None:
        """Release worker processes of the verifier; the source can be used again afterwards."""
        ...
