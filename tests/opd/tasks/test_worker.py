import os
import subprocess
import sys
import threading

import psutil
import pytest
from waiting import PATIENCE, wait_until

from opd.tasks.worker import CheckFailed, Worker


@pytest.fixture
def worker(bad_checks):
    worker = Worker(bad_checks, timeout=PATIENCE)
    yield worker
    worker.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_child_answers_all_requests_until_it_is_closed(worker):
    first, second = worker.ask({"do": "a"}), worker.ask({"do": "b"})
    assert (first["echo"], second["echo"]) == ("a", "b") and first["pid"] == second["pid"]
    worker.close()
    assert not alive(first["pid"])


def test_a_check_that_hangs_is_ended_and_the_next_request_is_answered(worker):
    pid = worker.ask({"do": "a"})["pid"]
    worker._timeout = 0.5
    with pytest.raises(CheckFailed, match=r"no answer within 0\.5 s"):
        worker.ask({"do": "hang"})
    worker._timeout = PATIENCE
    assert not alive(pid)
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_closing_ends_a_check_in_progress(worker, tmp_path):
    started, refusals = tmp_path / "started", []

    def ask():
        try:
            worker.ask({"do": "hang", "started": str(started)})
        except CheckFailed as error:
            refusals.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(started.exists)
    worker.close()
    asking.join(PATIENCE)
    assert refusals == ["the worker process ended"]
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_what_a_module_imports_first_takes_no_time_from_its_checks(tmp_path, monkeypatch):
    (tmp_path / "slow_to_load.py").write_text(
        "import time\nready = []\n"
        "def prepare(argument):\n    time.sleep(1.0)\n    ready.append(argument)\n"
        "def check(request): return {'ready': ready}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Worker("slow_to_load:check", timeout=0.9, argument="all")
    try:
        assert worker.ask({}) == {"ready": ["all"]}
    finally:
        worker.close()


def test_a_check_that_raises_keeps_the_child(worker):
    pid = worker.ask({"do": "a"})["pid"]
    with pytest.raises(CheckFailed, match="ZeroDivisionError: oops"):
        worker.ask({"do": "raise"})
    assert worker.ask({"do": "b"})["pid"] == pid


def test_a_check_that_kills_the_child_is_a_failed_check(worker):
    with pytest.raises(CheckFailed, match="ended"):
        worker.ask({"do": "die"})
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_what_a_check_prints_does_not_disturb_the_answers(worker):
    assert worker.ask({"do": "print"})["echo"] == "print"


@pytest.mark.parametrize(
    "text", ["nope", "[" * 100_000, "[]", "1", "\x00"], ids=["word", "deep", "list", "number", "nul"]
)
def test_a_child_that_writes_into_its_answers_has_failed_and_is_replaced(worker, text):
    pid = worker.ask({"do": "a"})["pid"]
    with pytest.raises(CheckFailed, match="its answer is"):
        worker.ask({"do": "garble", "text": text})
    assert worker.ask({"do": "b"})["echo"] == "b" and not alive(pid)


def test_an_answer_without_an_end_is_given_up(worker):
    with pytest.raises(CheckFailed, match="longer than"):
        worker.ask({"do": "flood"})
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_what_a_child_writes_unasked_answers_no_later_request(worker, tmp_path):
    asked, done = tmp_path / "asked", tmp_path / "done"
    worker.ask({"do": "later", "text": '{"echo": "forged"}', "asked": str(asked), "done": str(done)})
    asked.touch()
    wait_until(done.exists)
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_half_a_surrogate_goes_both_ways(worker):
    assert worker.ask({"do": "\ud800"})["echo"] == "\ud800"


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_check_that_hangs_ends_after_its_caller_was_killed(bad_checks):
    code = (
        "import os, signal, threading\n"
        "from opd.tasks.worker import Worker\n"
        f"worker = Worker({bad_checks!r}, timeout=1.0)\n"
        "worker._running()\n"  # its child ends a check after three seconds; the caller waits for any time
        "worker._timeout = 600.0\n"
        "print(worker.ask({'do': 'a'})['pid'], flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "worker.ask({'do': 'grind'})"
    )
    caller = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    child = int(caller.stdout)
    wait_until(lambda: not running(child))  # with nothing else to end it


def test_the_alarm_of_a_check_ends_with_it(tmp_path, monkeypatch):
    """Otherwise it would end a child that waits for its next request."""
    (tmp_path / "watched.py").write_text(
        "import signal, threading, time\n"
        "def watch(stopped):\n"
        "    while signal.getitimer(signal.ITIMER_REAL)[0]: time.sleep(0.01)\n"
        "    open(stopped, 'w').close()\n"
        "def check(request):\n"
        "    armed = signal.getitimer(signal.ITIMER_REAL)[0] > 0\n"
        "    threading.Thread(target=watch, args=[request['stopped']], daemon=True).start()\n"
        "    return {'armed': armed}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker, stopped = Worker("watched:check", timeout=2 * PATIENCE), tmp_path / "stopped"
    try:
        assert worker.ask({"stopped": str(stopped)}) == {"armed": True}
        wait_until(stopped.exists)
    finally:
        worker.close()


def test_ctrl_c_in_a_terminal_ends_no_check_of_a_caller_that_goes_on(bad_checks):
    code = (
        "import os, signal\n"
        "from opd.tasks.worker import Worker\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        f"worker = Worker({bad_checks!r}, timeout={PATIENCE})\n"
        "pids = [worker.ask({'do': 'a'})['pid']]\n"
        "os.killpg(0, signal.SIGINT)\n"  # as a terminal does, to every process of its foreground
        "pids.append(worker.ask({'do': 'b'})['pid'])\n"
        "worker.close()\n"
        "assert pids[0] == pids[1]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, start_new_session=True)


def test_threads_get_their_own_answers(worker):
    found = {}

    def ask(index):
        found[index] = worker.ask({"do": f"t{index}"})["echo"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {index: f"t{index}" for index in range(8)}


def test_a_check_that_does_not_import_says_so():
    worker = Worker("opd.tasks.nowhere:check", timeout=1.0)
    with pytest.raises(CheckFailed, match="ModuleNotFoundError"):
        worker.ask({})
