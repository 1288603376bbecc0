"""What a run writes when it ends, however it ends: ending.json and the report.

Nothing here can stop a run or hide the error that did: on a full disk the report is missing, and a warning is logged.
"""

import logging
from dataclasses import asdict
from types import TracebackType
from typing import Any

from opd.errors import OpdError
from opd.fleet.source import ScoreSource
from student.run.folder import RESUMABLE, RunFolder

log = logging.getLogger(__name__)


class RunEnding:
    """An exit callback: writes how the run ended, what its fleet did, and the report.

    Args:
        folder: of the run.
        fleet: its teachers; still open when the callback is called.
        report: whether to write one; there is nothing to show of a run that kept no metrics.
    """

    def __init__(self, folder: RunFolder, fleet: ScoreSource | None, *, report: bool = True) -> None:
        self._folder, self._fleet, self._report = folder, fleet, report
        (folder.path / "ending.json").unlink(missing_ok=True)  # of the run that is resumed

    def __call__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        """Write both; see `ExitStack.push`."""
        if not self._folder.used:
            return  # An unused folder is removed, or holds nothing to report.
        try:
            how = "finished" if kind is None else "stopped" if issubclass(kind, RESUMABLE) else "failed"
            text = str(error) if isinstance(error, OpdError) else "" if kind is None else f"{kind.__name__}: {error}"
            ending = {"how": how, "error": text, "fleet": self._status()}
            self._folder.write_json("ending.json", ending)
            if self._report:
                from student.run.report.page import write_report

                write_report(self._folder.path)
        except Exception as failure:
            log.warning("the report of %s could not be written: %s", self._folder.path, failure)

    def _status(self) -> dict[str, Any] | None:
        if self._fleet is None:
            return None
        try:
            return asdict(self._fleet.status())
        except OpdError:
            return None
