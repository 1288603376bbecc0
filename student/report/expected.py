"""Expected figures of a run: a JSON file with values, bands and sources.

    {"about": "one 24 GB GPU ...",
     "expected": {"payload_bytes_per_token": {"value": 136.0, "band": 0.02, "source": "measured on a CPU"},
                  "reverse_kl_left":         {"high": 0.9, "source": "a run above it has learnt nothing"},
                  "eval/accuracy@0":         {"value": 0.496, "source": "the model's card, other prompts"},
                  "tokens_per_second":       {"source": "unknown"}}}

A figure is judged if it has a band: `low`, `high` or both, or `band`, the share of `value` by which it may differ in
either direction. Without a band it is printed next to the run's figure but not judged. See `opd compare` for the
figures.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, model_validator

from opd.config import Settings, parse_settings
from opd.errors import ConfigError, OutputError
from opd.files import write_whole

_NOISE_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of a comparison.

    Attributes:
        name: name of the figure.
        value: the run's value; None if it has none.
        beside: the values of the other runs, or the expectation in words.
        verdict: "within", "below", "above" or "missing"; "" if the figure is not judged.
    """

    name: str
    value: float | None
    beside: tuple[str, ...]
    verdict: str = ""

    @property
    def bad(self) -> bool:
        """Whether the figure is outside its band or missing."""
        return self.verdict in ("below", "above", "missing")


class Expectation(Settings):
    """What is expected of one figure."""

    value: float | None = Field(None, description="Figure that was measured or published.")
    band: float | None = Field(None, ge=0, description="Share of `value` by which a run may differ from it.")
    low: float | None = Field(None, description="Minimum figure that is accepted.")
    high: float | None = Field(None, description="Maximum figure that is accepted.")
    source: str = Field(min_length=1, description='Where the figure comes from, or "unknown".')

    @model_validator(mode="after")
    def _check(self) -> "Expectation":
        if self.band is not None and (self.value is None or self.low is not None or self.high is not None):
            raise ValueError("band is a share of value and excludes low and high; set value and band, or low and high")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}; change one of them")
        return self

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The lowest and highest accepted value; None for no bound."""
        if self.value is None or self.band is None:
            return self.low, self.high
        width = abs(self.value) * self.band
        return self.value - width, self.value + width

    def words(self) -> str:
        """The expectation in words."""
        low, high = self.bounds
        parts = [] if self.value is None else [f"{self.value:.4g}"]
        if low is not None and high is not None:
            parts.append(f"{low:.4g} to {high:.4g}")
        elif low is not None:
            parts.append(f"at least {low:.4g}")
        elif high is not None:
            parts.append(f"at most {high:.4g}")
        return f"{', '.join(parts) or 'not known'} ({self.source})"

    def judged(self, name: str, value: float | None) -> Line:
        """Compare a run's figure with the expectation."""
        low, high = self.bounds
        if low is None and high is None:
            return Line(name, value, (self.words(),))
        if value is None:
            return Line(name, value, (self.words(),), "missing")
        below, above = low is not None and value < low, high is not None and value > high
        return Line(name, value, (self.words(),), "below" if below else "above" if above else "within")


class Expectations(Settings):
    """A file of expected figures."""

    about: str = Field("", description="Which run the figures are from, and on which machine.")
    expected: dict[str, Expectation] = Field(min_length=1, description="Expected figures by name.")


def read_expected(path: Path) -> Expectations:
    """The file at `path`.

    Raises:
        ConfigError: for a file that cannot be read, that is not JSON, or that does not have the form of the module.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); name a file of expected figures.") from error
    if not isinstance(data, dict) or "expected" not in data:
        raise ConfigError(
            f"{path} does not hold expected figures; it needs the key expected, with a group for each figure."
        )
    return parse_settings(Expectations, data, source=str(path))


def against_expected(found: Mapping[str, float], path: Path) -> list[Line]:
    """The figures that a file names, judged by its bands; see `read_expected` for what it raises."""
    return [band.judged(name, found.get(name)) for name, band in read_expected(path).expected.items()]


def write_expected(found: Mapping[str, float], path: Path, *, band: float, about: str, source: str) -> int:
    """Write the figures of a run as expectations for later runs; returns how many have a band.

    Figures of 0 and times below a millisecond get no band, because noise would exceed a share of them.

    Args:
        found: the figures.
        path: the file to write.
        band: share of a figure by which a later run may differ.
        about: which run this is, for readers of the file.
        source: where the figures come from.

    Raises:
        ConfigError: if the file exists, as it may hold values entered by hand.
        OutputError: if it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already; remove it or name another file.")
    # Not rounded, or a figure would lie outside a band of 0 around itself.
    entries: dict[str, dict[str, float | str]] = {}
    for name, value in found.items():
        noise = _NOISE_SECONDS if "seconds" in name else 0.0
        entries[name] = {"value": value} | ({"band": band} if abs(value) > noise else {}) | {"source": source}
    try:
        write_whole(path, json.dumps({"about": about, "expected": entries}, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}; name another file.") from error
    return sum("band" in entry for entry in entries.values())
