"""Server processes of the constant engine for the fleet's benchmarks: at fixed ports, so that they can be restarted."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from opd.wire.types import ScoreItem

VOCAB = 151_936
_ROOT = Path(__file__).resolve().parents[1]
_PATH = os.pathsep.join(str(_ROOT / part) for part in ("", "benchmarks", "tests/support"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def numbered_rows(count: int, tokens: int) -> list[ScoreItem]:
    """Rows of `tokens` ids, half prompt and half response, whose first id is their number."""
    rows = []
    for number in range(count):
        ids = np.full(tokens, 7, np.uint32)
        ids[0] = number % VOCAB
        rows.append(ScoreItem(ids, tokens // 2))
    return rows


class ServerProcess:
    """One server process of teacher "t" at a port of its own."""

    def __init__(self, folder: Path, seconds_per_token: float, *flags: str) -> None:
        self._folder = folder
        self._folder.mkdir()
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._starts = 0
        program = "faulty_server" if "--fault" in flags else "teacher_server"
        self._command = [sys.executable, "-m", program, "--model", "t=constant", "--port", str(port)]
        self._command += ["--engine", "constant_engine:ConstantEngine", "--metrics-port", "-1", "--log-level", "error"]
        self._command += ["--engine-option", f"seconds_per_token={seconds_per_token}", *flags]
        self.start()

    def start(self) -> None:
        """Start a process; returns before it serves."""
        self._starts += 1
        self._ready = self._folder / f"port{self._starts}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _PATH}
        self.process = subprocess.Popen([*self._command, "--port-file", str(self._ready)], env=environment)

    def wait(self) -> None:
        """Until it serves."""
        while not self._ready.exists():
            if self.process.poll() is not None:
                raise SystemExit("a server did not start")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)
