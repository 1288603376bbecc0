"""What controllers and rollout strategies have in common: what they ask of a run, and the state that they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from student.data.needs import Needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.report import StepReport
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class StepPlugin:
    """A plug-in that takes part in the steps of a run; every hook has a default that does nothing."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def needs(self) -> Needs:
        """What the plug-in needs besides the needs of the objective."""
        return Needs()

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Check the whole recipe before anything is loaded, in dry runs too.

        Raises:
            ConfigError: if the plug-in cannot work with it.
        """

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Look at the first training prompts before the student is loaded, also in a dry run.

        Raises:
            DataError, ConfigError: when they lack what it reads, or it cannot work with them.
        """

    def tags(self, prompt: Prompt) -> frozenset[str]:
        """Names of the tags that it puts on all rows of a prompt, by which advantages may then form groups."""
        return frozenset()

    def against_summaries(self) -> str:
        """A clause saying why it cannot work if students summarise episodes (history: summary); "" if it can."""
        return ""

    def remarks(self, recipe: Recipe) -> list[str]:
        """Warnings to log about a recipe that is valid but may not do what its author expects, one clause each."""
        return []

    def observe(self, report: StepReport) -> None:
        """Learn from the report of a finished step, which is the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint: nested dicts of JSON values, numpy arrays and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
