"""Packages that a recipe will need at some time, asked for in its first second and in a dry run."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from opd.extras import require
from student.plugin.base import Plugin
from student.settings.recipe import Recipe


class Feature(NamedTuple):
    """A key of the recipe that needs a package beyond those that opd always brings.

    Attributes:
        asked: whether a recipe uses it.
        said: what needs the package, in the message.
        package, extra: its import name, and the extra of opd that brings it.
        otherwise: what to do instead.
    """

    asked: Callable[[Recipe], bool]
    said: str
    package: str
    extra: str
    otherwise: str


def _quantizes(recipe: Recipe) -> bool:
    return recipe.model.lora is not None and recipe.model.lora.quantize is not None


def _small_moments(recipe: Recipe) -> bool:
    return recipe.train.optimizer == "adamw_8bit"


_QUANTIZED = ("bitsandbytes", "quantized")
FEATURES = (
    Feature(lambda recipe: recipe.model.lora is not None, "model.lora", "peft", "lora", "remove model.lora"),
    Feature(_quantizes, "model.lora.quantize", *_QUANTIZED, "set it to null"),
    Feature(_small_moments, "train.optimizer adamw_8bit", *_QUANTIZED, "set it to adamw"),
    Feature(lambda recipe: recipe.tracing, "tracing", "opentelemetry.sdk", "otel", "set tracing to false"),
)


def check_extras(recipe: Recipe, plugins: Iterable[Plugin[Any]]) -> None:
    """Refuse a recipe some of whose packages are missing, whenever it would import them.

    Raises:
        ConfigError: naming the key or plug-in, the package and the command that installs it.
    """
    for feature in FEATURES:
        if feature.asked(recipe):
            require(feature.said, feature.package, feature.extra, feature.otherwise)
    for tracker in recipe.trackers:
        require(f"tracker {tracker.name}", tracker.name, "trackers", "remove it from trackers")
    for plugin in plugins:
        for package, extra in plugin.extras.items():
            require(str(plugin.settings.name), package, extra)
