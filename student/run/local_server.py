"""A teacher server on loopback in a separate process, for the demo, the lab, ORBIT and experiments by hand.

It ends with the block, or when the process that opened the block ends for any reason.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from opd.errors import UnavailableError
from student.run.with_parent import with_parent

START_SECONDS = 600
"""Seconds to wait for the server; a loaded machine may take minutes to import torch."""
STOP_SECONDS = 30
CPU = ("--threads", "1", "--device", "cpu", "--deterministic")
"""Flags of `opd serve` for tiny models on few cores."""


@contextmanager
def served(models: Mapping[str, Path | str], folder: Path, flags: Sequence[str] = CPU) -> Iterator[str]:
    """Serve `models` for the duration of the block; yields the address.

    Args:
        models: model folders by name of the teacher.
        folder: receives server.log and server.ports; created if missing.
        flags: flags of `opd serve` besides models and ports.

    Raises:
        UnavailableError: if the server does not start; the message names its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ports, log = folder / "server.ports", folder / "server.log"
    ports.unlink(missing_ok=True)
    named = [flag for name, path in models.items() for flag in ("--model", f"{name}={path}")]
    ours = ["--port", "0", "--metrics-port", "-1", "--port-file", str(ports), "--grace", "5"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            with_parent([sys.executable, "-m", "teacher_server", *named, *ours, *flags]),
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # it ends with the block, after those that still use it
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        # The file appears atomically once the server listens; loading a model may take minutes.
        while not ports.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError(f"the teacher server did not start; look into its log {log}.")
            time.sleep(0.1)
        yield ports.read_text().split()[0]
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
