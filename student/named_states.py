"""Keeps the states of a list of plug-ins by their names, so that a resumed run gives none the state of another.

The second plug-in of a name is NAME#2, the third NAME#3. A resumed run may list its plug-ins in another order, add
some, which begin anew, and leave some out, whose state is dropped; a warning names both. A name given several times
must be given as often as before, and in the same order: nothing else tells which state belongs to which.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from opd.errors import CheckpointError, OpdError

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """A plug-in with a state."""

    @property
    def settings(self) -> Any:
        """Its settings, with its name."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""


def names_of(parts: Sequence[Stateful]) -> list[str]:
    """A name for each plug-in, all different: its registered name or its path, from the second on with #2, #3 ..."""
    seen: Counter[str] = Counter()
    found = []
    for part in parts:
        name = str(part.settings.name)
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def states_of(parts: Sequence[Stateful]) -> dict[str, dict[str, Any]]:
    """The state of every plug-in by its name."""
    return {name: part.state_dict() for name, part in zip(names_of(parts), parts, strict=True)}


def load_states(parts: Sequence[Stateful], states: Mapping[str, dict[str, Any]], where: str) -> None:
    """Give each plug-in the state of its name; a new plug-in keeps the state that it has.

    Args:
        parts: the plug-ins of the recipe.
        states: what `states_of` gave when the checkpoint was written.
        where: the key of the recipe that lists them, for messages.

    Raises:
        CheckpointError: if a plug-in cannot take its state, or is given several times and not as often as before.
    """
    named = dict(zip(names_of(parts), parts, strict=True))
    _check_counts(list(named), states, where)
    for name, part in named.items():
        if name in states:
            _load(part, states[name], f"{where}.{name}")
        elif part.state_dict():
            log.warning("%s.%s is not in the checkpoint and begins anew", where, name)
    for name, state in states.items():
        if name not in named and state:
            log.warning(
                "%s.%s has a state in the checkpoint, which is dropped: the recipe no longer lists it", where, name
            )


def _check_counts(names: Sequence[str], states: Mapping[str, dict[str, Any]], where: str) -> None:
    now, before = (Counter(name.partition("#")[0] for name in every) for every in (names, states))

    def times(count: int) -> str:
        return "once" if count == 1 else f"{count} times"

    for name, count in now.items():
        kept = any(state for other, state in states.items() if other.partition("#")[0] == name)
        if kept and count != before[name]:
            raise CheckpointError(
                f"{where} lists {name} {times(count)}, and listed it {times(before[name])} when the checkpoint was "
                f"written, so that it is not known which state belongs to which; list it {times(before[name])} and in "
                "the same order, or begin a new run."
            )


def _load(part: Stateful, state: dict[str, Any], where: str) -> None:
    try:
        part.load_state_dict(state)
    except OpdError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the load_state_dict of {where} cannot take its state in the checkpoint ({error!r}); resume with the "
            "recipe, the plug-ins and the version of opd that wrote it, or begin a new run."
        ) from error
