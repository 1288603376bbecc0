"""Writes the report of a run, and ending.json when it ends, for whatever reason.

Failures in here neither stop a run nor hide the error that did: if the disk is full, the report is missing and a
warning is logged.
"""

import logging
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from opd.errors import OpdError
from opd.fleet.source import ScoreSource
from student.run.folder import RESUMABLE, RunFolder
from student.run.progress import now

log = logging.getLogger(__name__)


def keep_report(run: Path) -> None:
    """Write the report of a run as far as it is; if that fails, a warning is logged."""
    try:
        from student.report.page.page import write_report

        write_report(run)
    except Exception as failure:
        log.warning("the report of %s could not be written: %s", run, failure)


class RunEnding:
    """An exit callback that writes how the run ended, what its fleet did, and the report.

    Args:
        folder: the run folder.
        fleet: the client of its teachers, still open when the callback is called.
        report: whether to write a report; a run without metrics has nothing to show.
    """

    def __init__(self, folder: RunFolder, fleet: ScoreSource | None, *, report: bool = True) -> None:
        self._folder, self._fleet, self._report = folder, fleet, report
        (folder.path / "ending.json").unlink(missing_ok=True)  # left by the run that is resumed

    def __call__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Write both files; the signature is that of `ExitStack.push`."""
        resumable = kind is not None and issubclass(kind, RESUMABLE)
        if not self._folder.used and not resumable:
            return  # An unused folder is removed.
        try:
            how = "finished" if kind is None else "stopped" if resumable else "failed"
            text = str(error) if isinstance(error, OpdError) else "" if kind is None else f"{kind.__name__}: {error}"
            ending = {"how": how, "error": text, "ended": now(), "fleet": self._status()}
            self._folder.write_json("ending.json", ending)
        except Exception as failure:
            log.warning("how %s ended could not be written: %s", self._folder.path, failure)
        if self._report:
            keep_report(self._folder.path)

    def _status(self) -> dict[str, Any] | None:
        if self._fleet is None:
            return None
        try:
            return asdict(self._fleet.status())
        except OpdError:
            return None
