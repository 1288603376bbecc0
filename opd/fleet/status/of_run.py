"""The fleet as a run sees it: from its metrics port while it runs, and from its folder once it has ended."""

import json
from pathlib import Path
from typing import Any

import yaml

from opd.config.text import read_yaml
from opd.errors import ConfigError, RunFolderError, UnavailableError, one_line
from opd.fleet.status.records import FleetStatus

FLEET_PAGE = "/fleet"
"""Path of the page that a student's metrics port has beside /metrics."""
_SECONDS = 3.0


def status_of_run(run: Path) -> FleetStatus:
    """What the run in a folder knows of its teachers now, or knew of them when it ended.

    Raises:
        RunFolderError: if it is not the folder of a run, or the run ended without saying what it knew.
        ConfigError: if the run opens no metrics port.
        UnavailableError: if the run does not answer.
    """
    recipe, ending = _held(run / "recipe.yaml"), _held(run / "ending.json")
    if not recipe:
        raise RunFolderError(f"{run} is not a run folder: it has no recipe.yaml that can be read.")
    if ending:
        return _parsed(
            ending.get("fleet"), f"{run / 'ending.json'} has no state of a fleet; name the endpoints instead."
        )
    port, host = recipe.get("metrics_port"), recipe.get("metrics_host") or "127.0.0.1"
    if not port:
        raise ConfigError(
            f"the run in {run} cannot be asked, as its recipe sets no metrics_port; set one, or name the endpoints."
        )
    from opd.http import Connection, NoReplyError

    place = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}{FLEET_PAGE}"
    advice = f"{place} does not answer as the run in {run}; look whether it still goes (opd watch {run})."
    try:
        with Connection(place, seconds=_SECONDS) as connection:
            reply = connection.send()
        return _parsed(json.loads(reply.raw) if reply.ok else None, advice)
    except (NoReplyError, ValueError) as error:
        raise UnavailableError(f"{advice} ({one_line(error)})") from error


def _parsed(values: Any, otherwise: str) -> FleetStatus:
    try:
        return FleetStatus.of(values)
    except (KeyError, TypeError) as error:
        raise UnavailableError(otherwise) from error


def _held(path: Path) -> dict[str, Any]:
    """The keys of a YAML or JSON file; none if it cannot be read."""
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
