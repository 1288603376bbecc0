"""A real server of another project, started as its users start it."""

import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

_READY_SECONDS = 600.0


class EngineProcess:
    """The server, in a process group of its own.

    Args:
        name: of the project, for messages.
        port: that the server listens on.
        words: its command line.
        variables: for its environment.
        modules: folder that comes first on its PYTHONPATH.
    """

    def __init__(self, name: str, port: int, words: Sequence[str], variables: Mapping[str, str], modules: Path) -> None:
        self.url, self._name = f"http://127.0.0.1:{port}", name
        path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the server)
        self._process = subprocess.Popen(
            words,
            env={**os.environ, "PYTHONPATH": path, **variables},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + _READY_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self._name} did not start: {self.said()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)

    def said(self) -> str:
        """The end of what it wrote."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-3000:]

    def kill(self) -> None:
        """As a machine that fails."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End it and whatever it started."""
        if self._process.poll() is None:
            self.kill()
        self._log.close()
