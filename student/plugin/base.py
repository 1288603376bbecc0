"""What all kinds of plug-ins have in common: their settings, what they ask of a run, and the state that they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Generic, get_args

from typing_extensions import TypeVar

from opd.config import Settings, with_defaults
from student.data.needs import Needs
from student.plugin.traits import Traits, check_members

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from opd.tasks.prompt import Prompt
    from student.data.report import StepReport
    from student.settings.recipe import Recipe

Settings_co = TypeVar("Settings_co", bound=Settings, covariant=True, default=Any)


class Plugin(Generic[Settings_co]):
    """Base class of all kinds of plug-ins. A subclass names its settings once: `class Brief(Reward[BriefSettings])`.

    Every hook has a default that does nothing. A subclass that differs in defaults of settings alone needs none of
    its own: `class Short(Brief, defaults={"most": 10})`.
    """

    settings_type: ClassVar[type[Settings]] = Settings
    evidence: ClassVar[str] = ""
    """How its formula is known: "text and code", "text", "abstract", "inferred" or "own"."""

    extras: ClassVar[Mapping[str, str]] = {}
    """Packages that it imports beyond those that opd always brings, each with the extra of opd that brings it."""

    def __init__(self, settings: Settings_co) -> None:
        self.settings = settings
        self.label = str(getattr(settings, "name", "")).rpartition(":")[2]
        """Its name in metrics and in `Row.reward_parts`; the objective numbers terms of the same name."""

    def __init_subclass__(cls, *, defaults: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Take `settings_type` from the type argument; a base of others takes the bound of its variable.

        Raises:
            PluginError: if the class has a member that is not read, such as one of an earlier version.
        """
        super().__init_subclass__(**kwargs)
        check_members(cls)
        for base in cls.__dict__.get("__orig_bases__", ()):
            for argument in get_args(base):
                cls.settings_type = getattr(argument, "__bound__", argument)
        if defaults is not None:
            cls.settings_type = with_defaults(cls.settings_type, defaults, owner=cls)

    def needs(self) -> Needs:
        """What it needs from teachers, rollout and student; a run whose fleet cannot serve it is refused."""
        return Needs()

    def check(self, recipe: Recipe, terms: Sequence[Any]) -> None:
        """Check the whole recipe before anything is loaded, in dry runs too.

        Args:
            recipe: the recipe.
            terms: the terms of the objective (`Term`, which derives from this class).

        Raises:
            ConfigError: if the plug-in cannot work in it, or could have no effect.
        """

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Look at the first training prompts before the student is loaded, also in a dry run.

        Raises:
            DataError, ConfigError: when they lack what it reads, or it cannot work with them.
        """

    @property
    def traits(self) -> Traits:
        """What it states of itself under its settings; a plain class attribute if that does not depend on them."""
        return Traits()

    def remarks(self, recipe: Recipe, terms: Sequence[Any]) -> list[str]:
        """Warnings to log about a recipe that is valid but may not do what its author expects, one clause each."""
        return []

    def observe(self, report: StepReport) -> None:
        """Learn from the report of a finished step, which is the same on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """State for the checkpoint: nested dicts of JSON values, numpy arrays and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
