"""Teacher server processes for the server's benchmarks."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Where constant_engine.py is, for servers that are told to import it.
BENCHMARKS = Path(__file__).resolve().parent.parent
# Servers run the code that lies beside the benchmarks.
_PATH = os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent)))
CONSTANT_ENGINE = ("--model", "t=constant", "--engine", "constant_engine:ConstantEngine")


@contextmanager
def running_server(
    port_file: Path, *flags: str, environment: Mapping[str, str] | None = None, quiet: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], list[str]]]:
    """Start `teacher_server` with one thread for its maths, wait until it serves, and end it by SIGTERM at the end.

    Args:
        port_file: does not exist yet; the server writes its addresses to it when it is ready.
        flags: of the server, beside the port file.
        environment: variables added to those of this process.
        quiet: drop what the server writes to stderr.

    Yields:
        The process and the words of the port file: its address, its metrics port (-1: none) and its process id.

    Raises:
        SystemExit: when the server ends instead of serving.
    """
    command = [sys.executable, "-m", "teacher_server", "--port-file", str(port_file), *flags]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _PATH, **(environment or {})}
    process = subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL if quiet else None)
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        yield process, port_file.read_text().split()
    finally:
        process.terminate()
        process.wait(60)
