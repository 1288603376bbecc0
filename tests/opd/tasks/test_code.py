"""Programs that misbehave, for real: each is held back, and the verdict says how it ended."""

import json
import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opd.errors import ConfigError
from opd.procs import sandbox
from opd.procs.sandbox import Ended, Limits, check_machine, run_python
from opd.tasks.code import CodeVerifier, LenientCodeVerifier, find_program
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import VerdictStatus

try:
    check_machine()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

SHORT = Limits(seconds=1.0, memory_mib=256, output_bytes=10_000)


def test_a_program_runs_and_its_tests_see_its_names() -> None:
    ran = run_python("import math\ndef f(x): return math.isqrt(x)\nprint(f(81))", "assert f(16) == 4")
    assert ran.ended is Ended.PASSED and ran.output == "9\n"
    wrong = run_python("def f(x): return x", "assert f(16) == 4, 'not four'")
    assert wrong.ended is Ended.FAILED and "not four" in wrong.reason
    assert run_python("def f(:", "").ended is Ended.FAILED
    assert run_python("print(input()[::-1])", stdin="abc").output == "cba\n"


def test_threads_are_allowed() -> None:
    program = "import threading\nfound = []\nt = threading.Thread(target=lambda: found.append(1))\nt.start(); t.join()"
    assert run_python(program, "assert found == [1]").ended is Ended.PASSED


def test_asyncio_works_and_no_pair_of_sockets_reaches_further() -> None:
    program = "import asyncio\nasync def f(): return await asyncio.to_thread(lambda: 3)\nprint(asyncio.run(f()))"
    assert run_python(program).output == "3\n"
    datagrams = run_python("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)", limits=SHORT)
    assert datagrams.ended is Ended.FAILED and "PermissionError" in datagrams.reason


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\nwhile True: time.sleep(1)",
        "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0)\ntime.sleep(99)",
    ],
)
def test_a_program_that_hangs_is_ended(program: str) -> None:
    ran = run_python(program, limits=Limits(seconds=0.3))
    assert ran.ended in (Ended.TIMED_OUT, Ended.KILLED)


def test_memory_is_bounded() -> None:
    ran = run_python("x = bytearray(2**30)", limits=Limits(seconds=60.0, memory_mib=256))
    assert ran.ended is Ended.FAILED and "MemoryError" in ran.reason
    assert run_python("x = []\nwhile True: x.append(bytes(2**20))", limits=SHORT).ended is not Ended.PASSED


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import multiprocessing as m\np = m.get_context('fork').Process(target=print)\np.start()\np.join()",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.kill(os.getppid(), 9)",
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nif l.syscall(435, 0, 0) < 0: raise OSError('no clone3')",
    ],
)
def test_no_process_can_be_made_or_hurt(program: str) -> None:
    ran = run_python(program, limits=SHORT)
    assert ran.ended is Ended.FAILED and "Error" in ran.reason, ran


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ran = run_python(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", limits=SHORT)
    assert ran.ended is Ended.FAILED and "PermissionError" in ran.reason


def test_no_file_can_be_written_and_none_of_the_users_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    writes = [f"open('{tmp_path}/new', 'w')", f"open('{secret}', 'a')", f"import os\nos.remove('{secret}')"]
    writes += [f"import os\nos.mkdir('{tmp_path}/d')", f"import os\nos.truncate('{secret}', 0)", "open('x', 'w')"]
    writes += ["import tempfile\ntempfile.TemporaryFile()", f"import os\nos.rename('{secret}', '{tmp_path}/other')"]
    for program in (*writes, f"print(open('{secret}').read())", "open('/etc/passwd')", "open('/proc/1/environ')"):
        ran = run_python(program, limits=SHORT)
        assert ran.ended is Ended.FAILED and "42" not in ran.output, program
    assert secret.read_text() == "42" and os.listdir(tmp_path) == ["secret"]


def test_the_environment_is_empty_and_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_SECRET", "hidden")
    assert run_python("import os\nprint(dict(os.environ))").output.count("hidden") == 0
    flood = run_python("while True: print('x' * 1000)", limits=SHORT)
    assert flood.ended is not Ended.PASSED and len(flood.output) <= SHORT.output_bytes


@pytest.mark.parametrize("program", ["import os\nos._exit(0)", "import sys\nsys.exit(0)", "raise SystemExit", "1/0"])
def test_a_program_that_ends_before_its_tests_has_not_passed_them(program: str) -> None:
    assert run_python(program, "assert False").ended is Ended.FAILED


def test_a_program_cannot_note_by_chance_that_it_has_passed() -> None:
    note = b'\n{"passed": true, "reason": ""}\n'
    program = f"""
import os
import platform
for place in range(3, 60):
    try:
        os.write(place, {note!r})
    except OSError:
        pass
os._exit(0)
"""
    assert run_python(program, "assert False").ended is Ended.FAILED


def test_a_sandbox_that_cannot_be_entered_says_nothing_about_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise OSError('refused')")
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    assert run_python("").ended is Ended.BROKEN
    prompt = Prompt.make("q", extra={"tests": "assert True"})
    assert CodeVerifier().verify(prompt, "").status is VerdictStatus.UNKNOWN


def test_a_verdict_by_source_or_by_examples() -> None:
    judge = CodeVerifier(timeout=60.0)
    prompt = Prompt.make("q", extra={"tests": "assert double(2) == 4"})
    answer = "First try:\n```python\ndef double(x): return x\n```\nBetter:\n```python\ndef double(x): return 2 * x\n```"
    assert judge.verify(prompt, answer).status is VerdictStatus.CORRECT
    assert judge.verify(prompt, "def double(x): return x").status is VerdictStatus.WRONG
    cases = [{"input": "1 2", "output": "3"}, {"input": "5 5", "output": "10\n"}, {"input": "1 1", "output": "5"}]
    verdict = judge.verify(Prompt.make("q", extra={"tests": cases}), "print(sum(map(int, input().split())))")
    assert verdict.status is VerdictStatus.WRONG and verdict.value == pytest.approx(2 / 3)
    assert "expected '5'" in verdict.reason
    assert judge.verify(Prompt.make("q"), answer).status is VerdictStatus.UNKNOWN
    lines = [{"input": ["1", "2"], "output": ["2", "1"]}]
    reverse = "import sys\nprint(*sys.stdin.read().split()[::-1], sep='\\n')"
    assert judge.verify(Prompt.make("q", extra={"tests": lines}), reverse).status is VerdictStatus.CORRECT
    assert find_program("print(1)") == "print(1)" and judge.extract(prompt, "a = 1 \n\nb") == "a = 1\nb"
    assert find_program("So:\n```python\nprint(1)\n") == "print(1)\n"
    assert find_program("So:\n```python\nprint(1)\n```\nas above.\n```\n") == "print(1)\n"


@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, open(0).read().split())))",
        "import os\nprint(sum(map(int, os.read(0, os.fstat(0).st_size).split())))",
        "import sys\nprint(sum(map(int, input().split())))\nprint('debug', file=sys.stderr)",
        "import sys\nprint(sum(map(int, input().split())))\nsys.exit()",
        "print(sum(map(int, input().split())))\nquit(0)",
        "import os\nprint(sum(map(int, input().split())), flush=True)\nos._exit(0)",
        "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
        "import threading, time\ndef run():\n    time.sleep(0.1)\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=run).start()",
        "import pickle\nclass A: pass\npickle.dumps(A())\nprint(sum(map(int, input().split())))",
    ],
    ids=["open-0", "os.read", "stderr", "exit", "quit", "_exit", "atexit", "thread", "pickle"],
)
def test_a_program_reads_prints_and_ends_as_programs_do(program: str) -> None:
    prompt = Prompt.make("q", extra={"tests": [{"input": "1 2", "output": "3"}]})
    verdict = CodeVerifier(timeout=60.0).verify(prompt, program)
    assert verdict.status is VerdictStatus.CORRECT, verdict


def test_a_program_that_says_it_failed_has_failed() -> None:
    ran = run_python("import sys\nprint(1)\nsys.exit('no solution')")
    assert (ran.ended, ran.output, ran.errors) == (Ended.FAILED, "1\n", "no solution\n")
    assert ran.reason == "the program ended with status 1"


def test_a_killed_program_is_wrong_or_unknown_as_chosen() -> None:
    prompt = Prompt.make("q", extra={"tests": "f()"})
    assert CodeVerifier(timeout=0.5).verify(prompt, "def f():\n while True: pass").status is VerdictStatus.WRONG
    assert (
        LenientCodeVerifier(timeout=0.5).verify(prompt, "def f():\n while True: pass").status is VerdictStatus.UNKNOWN
    )
    assert LenientCodeVerifier(timeout=60.0).verify(prompt, "def f(): raise ValueError").status is VerdictStatus.WRONG


@pytest.mark.parametrize("call", ["tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prlimit64"])
def test_no_other_process_is_reached_by_a_raw_call(call: str) -> None:
    numbers = {
        "x86_64": {"tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "prlimit64": 302},
        "aarch64": {"tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "prlimit64": 261},
    }[platform.machine()]
    # Signal 0 and no new limits: where it is allowed, nothing happens to the process that runs this test.
    arguments = {"tgkill": "p, p, 0", "prlimit64": "p, 7, None, b'x' * 16"}.get(call, "p, 0, b'x' * 128, None")
    program = f"""
import ctypes, os
libc, p = ctypes.CDLL(None, use_errno=True), {os.getpid()}
if libc.syscall({numbers[call]}, {arguments}) < 0:
    raise OSError(ctypes.get_errno(), "refused")
"""
    ran = run_python(program, limits=SHORT)
    assert ran.ended is Ended.FAILED and "PermissionError" in ran.reason, ran


@pytest.mark.parametrize("command", [8, 10, 15], ids=["F_SETOWN", "F_SETSIG", "F_SETOWN_EX"])
def test_no_file_sends_signals_to_another_process(command: int) -> None:
    """A pipe of the program, told to send SIGKILL to a process of the user when it is written to, would."""
    program = f"import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, {command}, {os.getpid() if command == 8 else 0})"
    ran = run_python(program, limits=SHORT)
    assert ran.ended is Ended.FAILED and "PermissionError" in ran.reason, ran
    fine = run_python("import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETFL, os.O_NONBLOCK)", limits=SHORT)
    assert fine.ended is Ended.PASSED, fine


@pytest.mark.parametrize("call", ["shmget(0, 4096, 0o1600)", "semget(0, 1, 0o1600)", "msgget(0, 0o1600)"])
def test_nothing_outlives_a_program(call: str) -> None:
    """Such objects stay in memory until they are removed, beyond all limits of the program that made them."""
    program = f"import ctypes\nlibc = ctypes.CDLL(None)\nmade = libc.{call}\n"
    program += "if made < 0: raise OSError('refused')\n"
    program += "libc.shmctl(made, 0, None); libc.semctl(made, 0, 0, None); libc.msgctl(made, 0, None)"
    ran = run_python(program, limits=SHORT)
    assert ran.ended is Ended.FAILED and "refused" in ran.reason, ran


def test_a_program_of_root_has_no_rights_of_root() -> None:
    """Else it could raise its limits again, or change the machine."""
    ran = run_python(
        "import ctypes\nl, b = ctypes.CDLL(None), ctypes.create_string_buffer(24)\n"
        "l.capget(b'\\x22\\x05\\x08\\x20\\0\\0\\0\\0', b)\nassert not any(b.raw), b.raw",
        limits=SHORT,
    )
    assert ran.ended is Ended.PASSED, ran
    if os.getuid() == 0:
        ran = run_python("import os\nos.setuid(65534)", limits=SHORT)
        assert ran.ended is Ended.FAILED and "PermissionError" in ran.reason, ran


def test_no_other_process_is_slowed_down() -> None:
    for call in (f"os.setpriority(os.PRIO_PROCESS, {os.getpid()}, 19)", f"os.sched_setaffinity({os.getpid()}, [0])"):
        ran = run_python(f"import os\n{call}", limits=SHORT)
        assert ran.ended is Ended.FAILED and "PermissionError" in ran.reason, ran


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_inputs_beside_outputs_are_examples_too(form: Callable[[dict[str, Any]], object]) -> None:
    prompt = Prompt.make("q", extra={"tests": form({"inputs": ["1\n", ["2"]], "outputs": ["2\n", ["3"]]})})
    judge = CodeVerifier(timeout=60.0)
    assert judge.verify(prompt, "print(int(input()) + 1)").status is VerdictStatus.CORRECT
    assert judge.verify(prompt, "print(2)").value == 0.5


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": [[1]], "outputs": [2], "fn_name": "f"},
        '[{"input": "1", "output": "2", "testtype": "functional"}]',
        [{"input": "[1]", "output": "2", "type": "function_call", "fn_name": "f"}],
    ],
    ids=["apps", "livecodebench", "deepcoder"],
)
def test_examples_that_call_a_function_leave_the_verdict_unknown(tests: object) -> None:
    verdict = CodeVerifier().verify(Prompt.make("q", extra={"tests": tests}), "print(2)")
    assert verdict.status is VerdictStatus.UNKNOWN and "call a function" in verdict.reason


@pytest.mark.parametrize(
    "tests",
    [[1, 2], {"a": 1}, {"inputs": ["1"], "outputs": []}, '{"inputs": ["1"]}', 3, [{"input": "1"}], '[{"input": "1"}]'],
)
def test_tests_that_are_no_tests_leave_the_verdict_unknown(tests: object) -> None:
    verdict = CodeVerifier().verify(Prompt.make("q", extra={"tests": tests}), "print(1)")
    assert verdict.status is VerdictStatus.UNKNOWN and "neither source code nor a list" in verdict.reason
    verdict = CodeVerifier().verify(Prompt.make("q", extra={"tests": "assert f(1) ="}), "print(1)")
    assert verdict.status is VerdictStatus.UNKNOWN and "the tests do not compile" in verdict.reason


def test_a_program_may_signal_and_limit_itself() -> None:
    program = "import resource, signal\nresource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
    program += "signal.signal(signal.SIGUSR1, lambda *_: print('told'))\nsignal.raise_signal(signal.SIGUSR1)"
    ran = run_python(program, limits=SHORT)
    assert ran.ended is Ended.PASSED and ran.output == "told\n", ran


@pytest.mark.parametrize("tests", ["[]", " \n", [], {"inputs": [], "outputs": []}])
def test_a_program_without_tests_is_not_right(tests: object) -> None:
    prompt = Prompt.make("q", extra={"tests": tests})
    assert CodeVerifier(timeout=60.0).verify(prompt, "pass").status is VerdictStatus.UNKNOWN
