"""A plug-in names its settings once, in brackets after its base."""

from typing_extensions import TypeVar

from student.plugin.base import Plugin
from student.plugin.controllers import Controller, ControllerSettings


class OuterSettings(ControllerSettings):
    size: int = 1


class InnerSettings(OuterSettings):
    depth: int = 2


OuterSettings_co = TypeVar("OuterSettings_co", bound=OuterSettings, covariant=True, default=OuterSettings)


class Outer(Controller[OuterSettings_co]):
    """A plug-in, and the base of others with settings of their own."""


class Inner(Outer[InnerSettings]):
    pass


class Heir(Inner):
    pass


def test_settings_are_the_type_argument_of_the_nearest_class_that_has_one() -> None:
    named: dict[type[Plugin], type] = {Controller: ControllerSettings, Inner: InnerSettings, Heir: InnerSettings}
    assert {cls: cls.settings_type for cls in named} == named


def test_a_base_of_other_plugins_has_the_settings_that_theirs_derive_from() -> None:
    assert Outer.settings_type is OuterSettings
    assert Outer(OuterSettings(name="outer")).settings.size == 1
