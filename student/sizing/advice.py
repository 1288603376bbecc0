"""What would make a step faster on this device, and by how much: settings that change numbers, which are off."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from student.job.plugins import Plugins
from student.job.rules import not_stale
from student.plugin.base import Plugin
from student.settings.recipe import Recipe
from student.sizing.hardware import Hardware
from student.sizing.times import Times

_WORTH = 1.1
"""Gains below this are not worth a line."""


def at_precision(recipe: Recipe, device: Hardware) -> Hardware:
    """The device at its speed in the precision of the recipe's student."""
    half = recipe.train.mixed_precision == "bf16" or recipe.model.dtype == "bfloat16"
    return device.in_half() if half else device


def faster(
    recipe: Recipe, plugins: Plugins, device: Hardware, times: Callable[[Recipe, Hardware], Times]
) -> Iterator[str]:
    """A line for each setting that would shorten a step.

    Args:
        recipe: the job.
        plugins: its plug-ins.
        device: the device of a rank.
        times: estimates a step of a recipe on a device.
    """
    train, here = recipe.train, at_precision(recipe, device)
    now = times(recipe, here).step
    gain = now / times(recipe, device.in_half()).step
    if here is device and gain >= _WORTH:
        yield (
            f"  train.mixed_precision: bf16 would make a step {gain:.1f} times as fast (its products are "
            f"{device.half:.1f} times as fast here); weights and moments stay float32"
        )
    ahead = recipe.model_copy(update={"train": train.model_copy(update={"max_staleness": 1})})
    gain = now / times(ahead, here).step
    if not train.max_staleness and gain >= _WORTH:
        parts: Sequence[Plugin[Any]] = (*plugins.terms, *plugins.controllers, plugins.strategy)
        refused = next(
            (f"; {part.settings.name} does not work with it: {why}" for part in parts if (why := not_stale(part))), ""
        )
        yield f"  train.max_staleness: 1 would make a step {gain:.1f} times as fast, with rows a step older{refused}"
