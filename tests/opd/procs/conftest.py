"""A service that misbehaves, for the tests of child processes."""

import pytest

BAD_CHECKS = """
import itertools, os, subprocess, sys, threading, time
from opd.procs.host import Service

def answers():
    return sys._getframe(3).f_locals["connection"]  # where the child writes

def later(connection, request):
    while not os.path.exists(request["asked"]):
        time.sleep(0.01)
    connection.sendall(request["text"].encode() + b"\\n")
    open(request["done"], "w").close()

def check(request):
    if "started" in request:
        open(request["started"], "w").close()
    match request["do"]:
        case "spawn":
            with open(request["pid"] + "~", "w") as file:
                file.write(str(subprocess.Popen(["sleep", "600"]).pid))
            os.rename(request["pid"] + "~", request["pid"])
            time.sleep(600)
        case "hang": time.sleep(60)
        case "grind": sum(itertools.repeat(0, 10**15))  # in C, which lets no thread and no handler run
        case "raise": raise ZeroDivisionError("oops")
        case "die": os._exit(3)
        case "leave":
            os.system("sleep 600 &")
            os._exit(3)
        case "print": print("noise on standard output")
        case "garble": answers().sendall(request["text"].encode() + b"\\n")
        case "flood":
            while True: answers().sendall(b"x" * 65536)
        case "later": threading.Thread(target=later, args=[answers(), request]).start()
    return {"echo": request["do"], "pid": os.getpid()}

class Bad(Service):
    def answer(self, request):
        return check(request)
"""


@pytest.fixture
def bad_checks(tmp_path, monkeypatch):
    """Dotted path of a service that does what the request says, importable in child processes."""
    (tmp_path / "bad_checks.py").write_text(BAD_CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "bad_checks:Bad"
