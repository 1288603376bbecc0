"""Programs that attack, for real: other processes, files, the machine, and the channel of their verdict."""

import os
import select
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow

from opd.errors import ConfigError
from opd.procs import sandbox, sandbox_child
from opd.procs.sandbox import MOST_THREADS, Ended, Limits, check_machine, run_python
from opd.tasks.code import CodeVerifier
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import VerdictStatus

try:
    check_machine()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

LIMITS = Limits(seconds=20.0, memory_mib=512)

ATTEMPTS = """
import ctypes, fcntl, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def ioctl(command, value):
    one, other = socket.socketpair()
    fcntl.ioctl(one.fileno(), command, struct.pack("i", value))

def control(command, value):
    fcntl.fcntl(os.pipe()[0], command, value)

for attempt in ATTEMPTS:
    try:
        eval(attempt)
    except PermissionError:
        continue
    except Exception as error:
        print(attempt, repr(error))
    else:
        print(attempt, "succeeded")
"""


def succeeded(*attempts: str) -> str:
    """Those of some expressions that a program evaluates without being refused."""
    ran = run_python(ATTEMPTS.replace("ATTEMPTS", repr(attempts)), limits=LIMITS)
    assert ran.ended is Ended.PASSED, ran
    return ran.output


def test_no_signal_reaches_another_process() -> None:
    other = os.getpid()
    attempts = [f"os.kill({other}, 0)", f"os.killpg({os.getpgid(0)}, 0)", "os.kill(-1, 0)", f"os.pidfd_open({other})"]
    attempts += [f"ioctl({command}, {other})" for command in (0x8901, 0x8902, 0x5452)]
    attempts += [f"control({command}, {other})" for command in (8, 10, 15, 1024, 1026)]
    attempts += [
        "control(fcntl.F_SETFL, os.O_ASYNC)",
        "call('prctl', 1, 9, 0, 0, 0)",
        "call('timer_create', 0, None, b'')",
    ]
    assert succeeded(*attempts) == ""


def test_no_mode_owner_time_or_attribute_of_a_file_changes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    before, path = secret.stat(), repr(str(secret))
    attempts = [f"os.chmod({path}, 0o777)", f"os.chown({path}, 1, 1)", f"os.lchown({path}, 1, 1)"]
    attempts += [f"os.utime({path})", f"os.utime({path}, (1, 1))", f"os.setxattr({path}, 'user.x', b'1')"]
    attempts += [f"os.removexattr({path}, 'user.x')", "os.fchmod(0, 0)", "os.fchown(1, 1, 1)", "os.utime(2)"]
    attempts += [f"os.link({path}, {path} + '2')", f"os.symlink('/', {path} + '2')", f"os.mkfifo({path} + '2')"]
    assert succeeded(*attempts) == ""
    after = secret.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime) == (before.st_mode, before.st_uid, before.st_mtime)
    assert stat.S_IMODE(after.st_mode) == 0o600 and os.listdir(tmp_path) == ["secret"]


def test_neither_the_machine_nor_the_caller_is_reached() -> None:
    other = os.getpid()
    attempts = [f"open('/proc/{other}/{name}').read()" for name in ("environ", "cmdline", "maps")]
    attempts += ["open('/proc/self/mem', 'rb+')", f"os.readlink('/proc/{other}/cwd')", "os.memfd_create('x')"]
    attempts += [f"resource.prlimit({other}, resource.RLIMIT_NOFILE)", f"os.setpriority(os.PRIO_PROCESS, {other}, 19)"]
    attempts += ["call('personality', 0x40000)", "call('unshare', 0x10000000)", "os.chroot('/')", "os.setuid(0)"]
    attempts += ["fcntl.lockf(open(os.__file__), fcntl.LOCK_SH)", "fcntl.flock(open(os.__file__), fcntl.LOCK_EX)"]
    attempts += ["socket.socket()", "socket.socket(socket.AF_UNIX)", "socket.socketpair()[0].bind(chr(0) + 'x')"]
    attempts += ["socket.socketpair()[0].sendmsg([b'x'])", "fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)"]
    assert succeeded(*attempts) == ""


THREADS = """
import threading
stop, started = threading.Event(), 0
threading.stack_size(65536)
try:
    for started in range(2000):
        threading.Thread(target=stop.wait, daemon=True).start()
except RuntimeError:
    print(started)
stop.set()
"""


def test_threads_are_bounded_and_those_of_other_processes_do_not_count() -> None:
    ran = run_python(THREADS, limits=LIMITS)
    # Where the kernel cannot limit the threads of one program, the program is ended instead.
    assert ran.ended is Ended.KILLED or 0 < int(ran.output) <= MOST_THREADS, ran


def test_a_program_with_too_many_threads_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_THREADS", 0)  # which sets no limit for the kernel
    ran = run_python("import time\ntime.sleep(99)", limits=LIMITS)
    assert ran.ended is Ended.KILLED and "threads" in ran.reason


def test_where_processes_are_hidden_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def hidden(path: Any, **how: Any) -> os.stat_result:
        if str(path).startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path, **how)

    monkeypatch.setattr(os, "stat", hidden)
    assert run_python("print(1)").ended is Ended.PASSED


@pytest.mark.parametrize(
    "note",
    [
        "b'nope'",
        "token + b'{nope'",
        "token + b'passed' * 2",
        "token + b'[' * 3000",
        "b'passed'",
        "token",
        "b'x' * 9999",
    ],
)
@pytest.mark.parametrize("end", ["", "\nos._exit(0)"])
def test_a_program_that_garbles_its_verdict_is_wrong(note: str, end: str) -> None:
    program = "import os, sys\nfound = sys._getframe(1).f_locals\ntoken, notes = found['token'], found['notes']\n"
    program += f"os.write(notes, {note}){end}"
    prompt = Prompt.make("q", extra={"tests": "assert True"})
    assert CodeVerifier(timeout=20.0).verify(prompt, program).status is VerdictStatus.WRONG


def test_a_program_cannot_make_its_tests_look_broken() -> None:
    for program in ("import os\nos.close(4)", "raise SyntaxError('the tests do not compile')", "import os\nos.abort()"):
        assert run_python(program, "pass", limits=LIMITS).ended in (Ended.FAILED, Ended.KILLED)
    for tests in ("f(", "-" * 100_000 + "1", "\0"):
        ran = run_python("pass", tests, limits=LIMITS)
        assert ran.ended is Ended.BROKEN and "the tests do not compile" in ran.reason, ran


@pytest.mark.parametrize(
    "program",
    [
        "raise ValueError(chr(0xd800))",
        "class Odd(Exception): __str__ = None\nraise Odd",
        "import sys\nsys.stdout.close()\nprint(chr(0xd800))",
        "raise type(chr(0xd800), (Exception,), {})",
    ],
)
def test_whatever_a_program_raises_becomes_text_that_can_be_written(program: str) -> None:
    ran = run_python(program, "pass", limits=LIMITS)
    assert ran.ended is Ended.FAILED and ran.reason, ran
    (ran.reason + ran.output + ran.errors).encode()


def test_a_program_may_close_all_files_and_go_on() -> None:
    ran = run_python("import os\nos.closerange(3, 64)\nprint(input())", stdin="still", limits=LIMITS)
    assert ran.ended is Ended.PASSED and ran.output == "still\n"


def test_a_program_waits_and_signals_within_its_process() -> None:
    program = """
import asyncio, os, select, signal, threading

async def wait():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await told.wait()

asyncio.run(wait())
poll, (reading, writing) = select.epoll(), os.pipe()
poll.register(reading, select.EPOLLIN)
threading.Timer(0.01, os.write, [writing, b"x"]).start()
assert poll.poll(30) and os.read(reading, 1) == b"x"
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
"""
    assert run_python(program, limits=LIMITS).ended is Ended.PASSED


@pytest.mark.parametrize(
    "library", ["numpy", "scipy.linalg", "sqlite3", "multiprocessing", *slow("sympy", "matplotlib.pyplot")]
)
def test_a_program_may_import_what_programs_use(library: str) -> None:
    ran = run_python(f"import {library}", limits=Limits(seconds=60.0, memory_mib=512))
    assert ran.ended is Ended.PASSED, ran


def test_a_program_does_not_outlive_a_killed_caller() -> None:
    caller = """
import subprocess
from opd.procs import sandbox

class Told(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        print(self.pid, flush=True)

def watch(pid, notes, seconds):
    print(notes.read(64), flush=True)
    input()

sandbox.subprocess.Popen, sandbox._watch = Told, watch
sandbox.run_python("import signal, time\\nsignal.setitimer(signal.ITIMER_REAL, 0)\\ntime.sleep(600)")
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", caller], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        program = os.pidfd_open(int(process.stdout.readline()))
        assert b"began" in process.stdout.readline()
        process.kill()
    try:
        assert select.select([program], [], [], 60.0)[0]
    finally:
        os.close(program)


def test_a_program_that_cannot_be_started_says_nothing_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    assert run_python("print(1)").ended is Ended.BROKEN


@pytest.mark.parametrize(("lacks", "told"), [("landlock_version", "Landlock"), ("has_seccomp", "seccomp")])
def test_a_kernel_that_cannot_confine_programs_is_refused(
    lacks: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_child, lacks, lambda: 0)
    with pytest.raises(ConfigError, match=told):
        check_machine.__wrapped__()


def test_where_threads_cannot_be_counted_apart_they_are_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise those of the user's other processes would count, and programs would get none."""

    def refuse(*_: int) -> None:
        raise OSError

    class Refusing:
        unshare = staticmethod(lambda _: -1)

    monkeypatch.setattr(os, "setresuid", refuse)
    monkeypatch.setattr(sandbox_child, "_LIBC", Refusing)
    assert not sandbox_child.count_alone()
