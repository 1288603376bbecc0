"""Runs Python code in a process that ends itself by SIGKILL where it is about to rename or link a certain file."""

import signal
import sys
from pathlib import Path

import forked

_DRIVER = """
import os, signal, sys
prefix = sys.argv.pop(1)
for name in ("rename", "replace", "link"):
    def dying(source, target, *, original=getattr(os, name), **options):
        if os.path.basename(source).startswith(prefix):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(source, target, **options)
    setattr(os, name, dying)
"""


def kill_at_rename(prefix: str, code: str, *arguments: Path | str) -> None:
    """Run `code`, which reads sys.argv[1:], until it renames something whose name begins with `prefix`."""
    command = [sys.executable, "-c", _DRIVER + code, prefix, *map(str, arguments)]
    killed = forked.run(command)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
