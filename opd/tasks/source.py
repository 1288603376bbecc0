"""The interface of all prompt sources.

A source is an indexable stream: the i-th training prompt depends only on the settings, the seed and i, so a run can
resume by remembering one number. By construction, held-out prompts never occur in training.
"""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict

Split = Literal["train", "heldout"]
Labels = frozenset[tuple[str | None, str | None]]
"""Pairs of (teacher, domain)."""
Measure = Callable[[Iterable[Prompt]], Iterable[int]]
"""Returns the number of tokens of each of several prompts, in order; an upper bound if that is within the limit."""


class Contents(NamedTuple):
    """What a table contained when it was read: its number of rows, and a SHA-256 over them in order."""

    rows: int
    sha256: str


@runtime_checkable
class PromptSource(Protocol):
    """A deterministic stream of prompts, with the verifier of their answers."""

    def prompts(self, split: Split, count: int, start: int = 0) -> list[Prompt]:
        """`count` prompts of a split, starting at position `start`.

        The training stream is endless (tables are reshuffled every epoch). Held-out prompts are distinct.

        Raises:
            DataError: if the held-out split has fewer than `start + count` distinct prompts.
        """
        ...

    def limit(self, measure: Measure, longest: int, *, drop: bool) -> int:
        """Exclude prompts of more than `longest` tokens from now on.

        Tables measure all their rows at once. Procedural tasks measure the prompts that they draw and, if `drop` is
        True, draw others in place of long ones.

        Args:
            measure: returns the number of tokens of each prompt.
            longest: most tokens of a prompt.
            drop: leave long prompts out; otherwise they are an error.

        Returns:
            The number of prompts that were left out.

        Raises:
            DataError: naming the first long prompt and its place; or if no prompt is left to train on.
        """
        ...

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge a completion of one of this source's prompts; unknown if that is not possible. Never raises."""
        ...

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The final answer in a completion, in a form that equal answers share; None if there is none."""
        ...

    def labels(self) -> Labels | None:
        """All pairs (teacher, domain) that a prompt of either split can have; None if they are not known.

        Before the first step, they decide whether every prompt has a teacher.
        """
        ...

    def contents(self) -> dict[str, Contents]:
        """What was read from files and datasets, by their names; empty if problems are drawn."""
        ...

    def close(self) -> None:
        """Stop the verifier's worker processes; the source can be used again afterwards."""
        ...


def too_long(prompt: Prompt, tokens: int, count: int, longest: int) -> DataError:
    """The error for `count` prompts of over `longest` tokens, of which `prompt`, with `tokens` tokens, is the first."""
    others = "" if count == 1 else f", and {count - 1} more prompts are too long"
    return DataError(
        f"{prompt.name} has {tokens} tokens, over the limit of {longest}{others}; raise rollout.max_prompt_tokens, or "
        "set rollout.long_prompts to drop."
    )
