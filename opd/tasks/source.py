"""The one interface of all prompt sources.

A source is an indexable stream: the i-th training prompt depends on the settings, the seed and i alone, so a run
resumes by remembering one number. Held-out prompts never occur in training, by construction.
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
"""Tokens of each of several prompts, in order; a bound on them where a prompt is within the limit for certain."""


class Contents(NamedTuple):
    """What a table held when it was read: its rows, and a SHA-256 over them in their order."""

    rows: int
    sha256: str


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

    def limit(self, measure: Measure, longest: int, *, drop: bool) -> int:
        """Let no prompt of more than `longest` tokens be given any more.

        Tables measure all their rows now; procedural tasks measure the prompts that they draw, and draw others in
        place of long ones where `drop` is True.

        Args:
            measure: tokens of each prompt.
            longest: most tokens of a prompt.
            drop: leave long prompts out; else they are an error.

        Returns:
            How many prompts were left out.

        Raises:
            DataError: naming the first long prompt and where it stands, or when none is left to train on.
        """
        ...

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Judge a completion of one of this source's prompts; unknown where that is not possible, never raises."""
        ...

    def extract(self, prompt: Prompt, completion: str) -> str | None:
        """The final answer in a completion, in a form that equal answers share; None where there is none."""
        ...

    def labels(self) -> Labels | None:
        """Every pair (teacher, domain) that a prompt of either split can carry; None where that is not known.

        It decides before the first step whether every prompt has a teacher.
        """
        ...

    def contents(self) -> dict[str, Contents]:
        """What was read from files and datasets, by their names; nothing where problems are drawn."""
        ...

    def close(self) -> None:
        """Release worker processes of the verifier; the source can be used again afterwards."""
        ...


def too_long(prompt: Prompt, tokens: int, count: int, longest: int) -> DataError:
    """The error for `count` prompts of more than `longest` tokens, of which `prompt` with `tokens` is the first."""
    others = "" if count == 1 else f", and {count - 1} more prompts are too long"
    return DataError(
        f"{prompt.name} has {tokens} tokens, over the limit of {longest}{others}; raise rollout.max_prompt_tokens, or "
        "set rollout.long_prompts to drop."
    )
