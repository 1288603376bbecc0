"""Saves the states of a list of plug-ins under their names, so that a resumed run restores each to its own plug-in.

The second plug-in of a name is NAME#2, the third NAME#3. A resumed run may list its plug-ins in another order. It may
also add plug-ins, which start with fresh state, and leave some out, whose saved state is discarded; each is logged as
a warning. Plug-ins of the same name must be as many as before, and in the same order: nothing else tells which state
belongs to which.
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
    """A unique name for each plug-in: its registered name or its path, with #2, #3 ... from the second of a name on."""
    seen: Counter[str] = Counter()
    names = []
    for part in parts:
        name = str(part.settings.name)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def states_of(parts: Sequence[Stateful]) -> dict[str, dict[str, Any]]:
    """The state of every plug-in by its name."""
    return {name: part.state_dict() for name, part in zip(names_of(parts), parts, strict=True)}


def load_states(parts: Sequence[Stateful], states: Mapping[str, dict[str, Any]], where: str) -> None:
    """Load the state saved under the name of each plug-in; a plug-in without one keeps the state that it has.

    Args:
        parts: the plug-ins of the recipe.
        states: what `states_of` gave when the checkpoint was written.
        where: the key of the recipe that lists them, for messages.

    Raises:
        CheckpointError: if a plug-in cannot load its state, or is listed several times but not as often as before.
    """
    named = dict(zip(names_of(parts), parts, strict=True))
    _check_counts(list(named), states, where)
    for name, part in named.items():
        if name in states:
            _load(part, states[name], f"{where}.{name}")
        elif part.state_dict():
            log.warning("the checkpoint has no state of %s.%s, which starts afresh", where, name)
    for name, state in states.items():
        if name not in named and state:
            log.warning("the recipe no longer lists %s.%s; its state in the checkpoint is discarded", where, name)


def _check_counts(names: Sequence[str], states: Mapping[str, dict[str, Any]], where: str) -> None:
    now, before = (Counter(name.partition("#")[0] for name in every) for every in (names, states))

    def times(count: int) -> str:
        return "once" if count == 1 else f"{count} times"

    for name, count in now.items():
        kept = any(state for other, state in states.items() if other.partition("#")[0] == name)
        if kept and count != before[name]:
            raise CheckpointError(
                f"{where} lists {name} {times(count)}, but the checkpoint has the states of {before[name]}; list it "
                f"{times(before[name])}, in the same order, or start a new run."
            )


def _load(part: Stateful, state: dict[str, Any], where: str) -> None:
    try:
        part.load_state_dict(state)
    except OpdError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where} could not load its state from the checkpoint ({error!r}); resume with the recipe, the plug-ins "
            "and the version of opd that wrote it, or start a new run."
        ) from error
