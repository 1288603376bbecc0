"""A plug-in names its settings once, in brackets after its base."""

import pickle

import pytest
from typing_extensions import TypeVar

from opd.config import parse_settings
from opd.errors import ConfigError
from student.plugin.base import Plugin
from student.plugin.controllers import Controller, ControllerSettings
from student.rl.losses.variants import Ppo


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


class Wide(Inner, defaults={"size": 7}):
    """`Inner` with another default."""


def test_a_plugin_that_differs_in_defaults_alone_names_them_and_no_settings() -> None:
    made = parse_settings(Wide.settings_type, {"name": "wide", "depth": 3})
    assert isinstance(made, InnerSettings) and (made.size, made.depth) == (7, 3)
    assert InnerSettings(name="inner").size == 1
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(ConfigError, match="size"):
        parse_settings(Wide.settings_type, {"name": "wide", "size": "many"})


def test_a_default_is_not_shared_by_those_who_get_it() -> None:
    one, other = (parse_settings(Ppo.settings_type, {"name": "ppo"}) for _ in range(2))
    one.advantage["name"] = "reinforce"
    assert other.advantage == {"name": "gae"}
