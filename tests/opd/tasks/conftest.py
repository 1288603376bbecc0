"""Checks that misbehave, for the tests of the worker process."""

import pytest

BAD_CHECKS = """
import itertools, os, time
def check(request):
    if "started" in request:
        open(request["started"], "w").close()
    match request["do"]:
        case "hang": time.sleep(60)
        case "grind": sum(itertools.repeat(0, 10**15))  # in C, which lets no thread and no handler run
        case "raise": raise ZeroDivisionError("oops")
        case "die": os._exit(3)
        case "print": print("noise on standard output")
    return {"echo": request["do"], "pid": os.getpid()}
"""


@pytest.fixture
def bad_checks(tmp_path, monkeypatch):
    """Dotted path of a check that does what the request says, importable in child processes."""
    (tmp_path / "bad_checks.py").write_text(BAD_CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "bad_checks:check"
