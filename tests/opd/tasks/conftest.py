"""Checks that misbehave, for the tests of the worker process."""

import pytest

BAD_CHECKS = """
import itertools, os, sys, threading, time

def answers():
    return sys._getframe(2).f_locals["answers"]  # where the worker writes

def later(file, request):
    while not os.path.exists(request["asked"]):
        time.sleep(0.01)
    print(request["text"], file=file, flush=True)
    open(request["done"], "w").close()

def check(request):
    if "started" in request:
        open(request["started"], "w").close()
    match request["do"]:
        case "hang": time.sleep(60)
        case "grind": sum(itertools.repeat(0, 10**15))  # in C, which lets no thread and no handler run
        case "raise": raise ZeroDivisionError("oops")
        case "die": os._exit(3)
        case "print": print("noise on standard output")
        case "garble": os.write(answers().fileno(), request["text"].encode() + b"\\n")
        case "flood":
            while True: os.write(answers().fileno(), b"x" * 65536)
        case "later": threading.Thread(target=later, args=[answers(), request]).start()
    return {"echo": request["do"], "pid": os.getpid()}
"""


@pytest.fixture
def bad_checks(tmp_path, monkeypatch):
    """Dotted path of a check that does what the request says, importable in child processes."""
    (tmp_path / "bad_checks.py").write_text(BAD_CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "bad_checks:check"
