"""Calls the hooks of all controllers in turn, and checks each result so that an error names the controller at fault.

A hook that forgets its `return`, for example, gives None, which would otherwise fail later and far from the plug-in.
Wrong results raise `PluginError`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from opd.errors import PluginError, short
from student.data.plan import StepPlan
from student.data.row import Row, are_rows
from student.learning.updates import Update
from student.plugin.controllers import Controller, Services


def planned(controllers: Sequence[Controller], plan: StepPlan) -> StepPlan:
    """Pass the plan of a step through `Controller.plan` of each controller in turn."""
    for controller in controllers:
        plan = controller.plan(plan)
        if not isinstance(plan, StepPlan):
            _refuse(controller, "plan", plan, "a StepPlan, for example the one it was given")
    return plan


def composed(controllers: Sequence[Controller], rows: list[Row]) -> list[Row]:
    """Pass the rows of a step through `Controller.compose` of each controller in turn."""
    for controller in controllers:
        rows = controller.compose(rows)
        if not are_rows(rows):
            _refuse(controller, "compose", rows, "a list of rows")
    return rows


def ordered(controllers: Sequence[Controller], updates: Iterable[Update], services: Services) -> Iterable[Update]:
    """Pass the updates of a step lazily through `Controller.updates` of each controller in turn."""
    for controller in controllers:
        returned = controller.updates(updates, services)
        if not isinstance(returned, Iterable):
            _refuse(controller, "updates", returned, "updates, for example those it was given")
        updates = _each(controller, returned)
    return updates


def _each(controller: Controller, updates: Iterable[Update]) -> Iterator[Update]:
    for update in updates:
        if not isinstance(update, Update):
            _refuse(controller, "updates", update, "updates, each a student.learning.updates.Update")
        yield update


def acted(controller: Controller, step: int, services: Services) -> dict[str, float]:
    """Call `Controller.after_update`, in which a controller may change the weights; returns its metrics as floats."""
    metrics = controller.after_update(step, services)
    if not isinstance(metrics, Mapping):
        _refuse(controller, "after_update", metrics, "metrics by name, {} for none")
    return {_text(controller, name): _number(controller, name, value) for name, value in metrics.items()}


def _text(controller: Controller, name: Any) -> str:
    return name if isinstance(name, str) else _refuse(controller, "after_update", name, "metrics by name, each a text")


def _number(controller: Controller, name: str, value: Any) -> float:
    if isinstance(value, int | float):
        return value
    try:
        return float(value)  # a tensor or an array of one number, which JSON does not take
    except (TypeError, ValueError, RuntimeError):
        _refuse(controller, "after_update", value, f"numbers, and metric {name!r} is not one")


def _refuse(controller: Controller, hook: str, returned: Any, expected: str) -> NoReturn:
    raise PluginError(
        f"method {controller.settings.name!r}: {hook} returned {short(returned)}; it must return {expected}."
    )
