"""Which teacher scores which prompt: by a column, by rules, or by a declared default; an unmapped prompt is an error.

A destination is one teacher, or several with weights. Several teachers are combined in one of two ways: `probability`
mixes their distributions, p = sum_i w_i p_i, exactly and including the tail (`mix_scores`); `divergence` sums the
divergences with the weights, which the objective does.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from opd.config import Settings
from opd.errors import ConfigError
from opd.wire.types import Scores

Combine = Literal["probability", "divergence"]


class RouteRule(Settings):
    """One rule: rows whose columns match go to a destination."""

    when: dict[str, str | list[str]] = Field(
        description="Mapping from a column to the value it must have, or to a list of values; * and ? are wildcards. "
        "All columns must match.",
    )
    teacher: str | dict[str, float] = Field(
        description="Teacher of the rows that match, or teachers with their weights."
    )


class RoutingSettings(Settings):
    """Which teacher scores which prompt."""

    column: str = Field(
        default="teacher", description="Column that names a prompt's teacher; it takes precedence over rules."
    )
    rules: list[RouteRule] = Field(
        default_factory=list, description="Rules, tried in order; the first that matches decides."
    )
    default: str | dict[str, float] | None = Field(
        default=None,
        description="Teacher of rows that neither the column nor a rule maps; null makes such a row an error.",
    )
    combine: Combine = Field(
        default="probability",
        description="How several teachers of one row become one signal: 'probability' mixes their distributions, "
        "'divergence' sums their divergences.",
    )


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a row goes.

    Attributes:
        parts: (teacher, weight), by name; weights are positive and sum to 1.
        combine: how several teachers are combined, "probability" or "divergence".
    """

    parts: tuple[tuple[str, float], ...]
    combine: Combine = "probability"

    @property
    def single(self) -> str | None:
        """The teacher if there is only one; otherwise None."""
        return self.parts[0][0] if len(self.parts) == 1 else None

    @property
    def name(self) -> str:
        """The teacher, or the weighted names of several, as `Row.teacher` has it."""
        return self.single or " + ".join(f"{weight:g} {name}" for name, weight in self.parts)

    @property
    def summed(self) -> tuple[tuple[str, float], ...]:
        """The teachers if the divergences to several are summed, as `Row.teachers` has them; otherwise ()."""
        return self.parts if self.combine == "divergence" and len(self.parts) > 1 else ()


class Router:
    """Routes rows to the teachers of a fleet.

    Args:
        settings: column, rules, default.
        served: names of the teachers that can be asked.

    Raises:
        ConfigError: a rule or the default names a teacher that is not served, or a weight that is not positive.
    """

    def __init__(self, settings: RoutingSettings, served: Iterable[str]) -> None:
        self._settings = settings
        self._served = sorted(served)
        where = "the default route"
        self._default = None if settings.default is None else self._destination(settings.default, where)
        self._rules = [
            (rule.when, self._destination(rule.teacher, f"route {number}"))
            for number, rule in enumerate(settings.rules, 1)
        ]

    def route(self, row: Mapping[str, Any]) -> Destination:
        """The destination of a row: its own column, else the first rule that matches, else the default.

        Args:
            row: the columns of the prompt.

        Raises:
            ConfigError: if nothing maps the row, or its column names a teacher that is not served.
        """
        # The prompt's own column takes precedence, because it may name another teacher than the rest of its domain.
        own = row.get(self._settings.column)
        if own is not None and own != "":
            return self._destination(own, f"column {self._settings.column!r} of a prompt")
        for when, destination in self._rules:
            if all(_matches(row.get(column), wanted) for column, wanted in when.items()):
                return destination
        if self._default is not None:
            return self._default
        found = {key: value for key, value in row.items() if isinstance(value, (str, int, float)) and key != "prompt"}
        shown = ", ".join(f"{key} {value!r}" for key, value in found.items())
        raise ConfigError(
            "no teacher is mapped for a prompt "
            f"{f'with {shown}' if shown else 'that names neither teacher nor domain'}; set teachers.default to one of "
            f"{', '.join(self._served) or 'those served'}, add a route for its domain (teachers.routes), or fill its "
            f"column {self._settings.column!r}."
        )

    def _destination(self, value: Any, where: str) -> Destination:
        if isinstance(value, str):
            parts = {value: 1.0}
        elif isinstance(value, Mapping) and value:
            parts = {str(name): weight for name, weight in value.items() if weight is not None}
        else:
            raise ConfigError(f"{where} is {value!r}; it must be a teacher's name or a mapping from names to weights.")
        for name, weight in parts.items():
            if name not in self._served:
                near = difflib.get_close_matches(name, self._served, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"served: {', '.join(self._served) or 'none'}."
                raise ConfigError(f"{where} names teacher {name!r}, which is not served; {hint}")
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
                raise ConfigError(
                    f"{where} gives teacher {name!r} the weight {weight!r}; weights must be positive numbers."
                )
        total = sum(parts.values())
        return Destination(tuple((name, parts[name] / total) for name in sorted(parts)), self._settings.combine)


def _matches(value: Any, wanted: str | list[str]) -> bool:
    if value is None:
        return False
    patterns = [wanted] if isinstance(wanted, str) else wanted
    return any(fnmatch.fnmatchcase(str(value), pattern) for pattern in patterns)


def mix_scores(parts: Sequence[tuple[Scores, float]]) -> Scores:
    """The scores of the mixture p = sum_i w_i p_i, exactly, from the teachers' scores of one row at the same ids.

    Every log-prob of the mixture, including that of the tail, is a log-sum-exp over the parts, as mass is linear in p.

    Args:
        parts: (scores, weight); payloads sampled or gather (the same ids in all), weights sum to 1.

    Returns:
        [T] and [T, K] float32 log-probs, nats; `weights_hash` joins those of the parts, `wire_bytes` is their sum, and
        `unasked` their maximum.

    Raises:
        ValueError: if ids differ, or for a payload that does not determine the mixture (topk, hidden).
    """
    if not parts:
        raise ValueError("parts: at least one teacher is needed, but there is none")
    # Weights with another sum would shift all log-probs by a constant, which nothing later would notice.
    total = sum(weight for _, weight in parts)
    if not np.isclose(total, 1.0):
        raise ValueError(f"parts: weights must sum to 1, but sum to {total}")
    first = parts[0][0]
    if first.sampled is None:
        raise ValueError("parts: a mixture needs sampled or gather payloads, but sampled log-probs are missing")
    for scores, _ in parts[1:]:
        one, other = first.ids, scores.ids
        same = one is other if one is None or other is None else np.array_equal(one, other)
        if not same:
            raise ValueError("parts: all teachers must be asked at the same ids; use payload gather, not topk")
    return Scores(
        sampled=_mix([(scores.sampled, weight) for scores, weight in parts]),
        values=_mix([(scores.values, weight) for scores, weight in parts]),
        ids=first.ids,
        log_tail=_mix([(scores.log_tail, weight) for scores, weight in parts]),
        weights_hash="+".join(scores.weights_hash for scores, _ in parts),
        wire_bytes=sum(scores.wire_bytes for scores, _ in parts),
        unasked=max(scores.unasked for scores, _ in parts),
    )


def _mix(parts: Sequence[tuple[NDArray[Any] | None, float]]) -> NDArray[np.float32] | None:
    arrays = [(array.astype(np.float64) + np.log(weight)) for array, weight in parts if array is not None]
    if len(arrays) != len(parts):
        return None
    stacked = np.stack(arrays)
    peak = stacked.max(0)
    # If no teacher has any mass here (a tail of exactly 0), -inf - -inf would be NaN.
    safe = np.where(np.isneginf(peak), 0.0, peak)
    with np.errstate(divide="ignore"):
        return np.asarray(safe + np.log(np.exp(stacked - safe).sum(0)), dtype=np.float32)
