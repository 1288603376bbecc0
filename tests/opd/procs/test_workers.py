import subprocess
import sys
import threading

import psutil
import pytest
from waiting import PATIENCE, wait_until

from opd.procs.children import ChildFailed
from opd.procs.workers import Workers


@pytest.fixture
def worker(bad_checks):
    worker = Workers(bad_checks, PATIENCE, most=1)
    yield worker
    worker.close()


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_one_child_answers_all_requests_until_it_is_closed(worker):
    first, second = worker.ask({"do": "a"}), worker.ask({"do": "b"})
    assert (first["echo"], second["echo"]) == ("a", "b") and first["pid"] == second["pid"]
    worker.close()
    assert not running(first["pid"])


def test_a_check_that_hangs_is_ended_and_the_next_request_is_answered(worker):
    pid = worker.ask({"do": "a"})["pid"]
    worker.timeout = 0.5
    with pytest.raises(ChildFailed, match=r"no answer within 0\.5 s"):
        worker.ask({"do": "hang"})
    worker.timeout = PATIENCE
    wait_until(lambda: not running(pid))
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_closing_ends_a_check_in_progress(worker, tmp_path):
    started, refusals = tmp_path / "started", []

    def ask():
        try:
            worker.ask({"do": "hang", "started": str(started)})
        except ChildFailed as error:
            refusals.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(started.exists)
    worker.close()
    asking.join(PATIENCE)
    assert refusals == ["its process ended"]
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_what_a_service_does_first_takes_no_time_from_its_requests(tmp_path, monkeypatch):
    (tmp_path / "slow_to_load.py").write_text(
        "import time\n"
        "from opd.procs.host import Service\n"
        "class Slow(Service):\n"
        "    def open(self): time.sleep(1.0)\n"
        "    def answer(self, request): return {'ready': self.argument}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = Workers("slow_to_load:Slow", 0.9, "all")
    try:
        assert worker.ask({}) == {"ready": "all"}
    finally:
        worker.close()


def test_a_check_that_raises_keeps_the_child(worker):
    pid = worker.ask({"do": "a"})["pid"]
    with pytest.raises(ChildFailed, match="ZeroDivisionError: oops"):
        worker.ask({"do": "raise"})
    assert worker.ask({"do": "b"})["pid"] == pid


def test_a_check_that_kills_the_child_is_a_failed_check(worker):
    with pytest.raises(ChildFailed, match="ended"):
        worker.ask({"do": "die"})
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_a_child_that_ends_is_noticed_at_once_whatever_it_leaves_behind(worker):
    with pytest.raises(ChildFailed) as caught:
        worker.ask({"do": "leave"})
    assert caught.value.kind == "died"


def test_what_a_check_prints_does_not_disturb_the_answers(worker):
    assert worker.ask({"do": "print"})["echo"] == "print"


@pytest.mark.parametrize(
    "text", ["nope", "[" * 100_000, "[]", "1", "\x00"], ids=["word", "deep", "list", "number", "nul"]
)
def test_a_child_that_writes_into_its_answers_has_failed_and_is_replaced(worker, text):
    pid = worker.ask({"do": "a"})["pid"]
    with pytest.raises(ChildFailed, match="its answer is"):
        worker.ask({"do": "garble", "text": text})
    assert worker.ask({"do": "b"})["echo"] == "b"
    wait_until(lambda: not running(pid))


def test_an_answer_without_an_end_is_given_up(worker):
    with pytest.raises(ChildFailed, match="longer than"):
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


def test_a_check_that_hangs_ends_after_its_caller_was_killed(bad_checks):
    code = (
        "import os, signal, threading\n"
        "from opd.procs.workers import Workers\n"
        f"worker = Workers({bad_checks!r}, 600.0)\n"
        "print(worker.ask({'do': 'a'})['pid'], flush=True)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "worker.ask({'do': 'grind'})"
    )
    caller = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    child = int(caller.stdout)
    wait_until(lambda: not running(child))  # with nothing else to end it


def test_what_a_hanging_check_started_is_killed_with_it(worker, tmp_path):
    worker.ask({"do": "a"})
    held = tmp_path / "pid"
    worker.timeout = 5.0
    with pytest.raises(ChildFailed) as caught:
        worker.ask({"do": "spawn", "pid": str(held)})
    assert caught.value.kind == "hung"
    wait_until(lambda: not running(int(held.read_text())))


def test_what_a_check_started_ends_after_its_caller_was_killed(bad_checks, tmp_path):
    held = tmp_path / "pid"
    code = (
        "import os, signal, threading, time\n"
        "from opd.procs.workers import Workers\n"
        "def end():\n"
        f"    while not os.path.exists({str(held)!r}): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threading.Thread(target=end).start()\n"
        f"Workers({bad_checks!r}, 600.0).ask({{'do': 'spawn', 'pid': {str(held)!r}}})"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    wait_until(lambda: not running(int(held.read_text())))


def test_a_host_that_was_killed_is_replaced(worker):
    worker.ask({"do": "a"})
    worker._host._process.kill()
    worker._host._process.wait()
    with pytest.raises(ChildFailed):
        worker.ask({"do": "die"})
    assert worker.ask({"do": "b"})["echo"] == "b"


def test_ctrl_c_in_a_terminal_ends_no_check_of_a_caller_that_goes_on(bad_checks):
    code = (
        "import os, signal\n"
        "from opd.procs.workers import Workers\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        f"worker = Workers({bad_checks!r}, {PATIENCE})\n"
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
    worker = Workers("opd.tasks.nowhere:Check", 1.0)
    with pytest.raises(ChildFailed, match="ModuleNotFoundError"):
        worker.ask({})


def test_as_many_processes_run_as_there_are_callers_up_to_the_limit(bad_checks):
    pool = Workers(bad_checks, 60.0, most=2)
    first = pool.ask({"do": "a"})["pid"]
    assert pool.ask({"do": "b"})["pid"] == first
    found, together = [], threading.Barrier(4)

    def ask():
        together.wait(timeout=120)
        found.append(pool.ask({"do": "c"})["pid"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert len(found) == 4 and 1 <= len(set(found)) <= 2


def test_a_check_that_hangs_holds_up_no_other_caller(bad_checks):
    pool = Workers(bad_checks, 600.0, most=2)
    failed = []

    def hang():
        try:
            pool.ask({"do": "hang"})
        except ChildFailed as error:
            failed.append(str(error))

    thread = threading.Thread(target=hang)
    thread.start()
    assert pool.ask({"do": "b"})["echo"] == "b"
    while not pool._busy:
        assert thread.is_alive()
    pool.close()  # ends the check in the middle
    thread.join(timeout=60)
    assert not thread.is_alive() and len(failed) == 1
    assert pool.ask({"do": "c"})["echo"] == "c"
    pool.close()


def test_a_check_that_fails_gives_its_process_back(bad_checks):
    pool = Workers(bad_checks, 60.0, most=1)
    for _ in range(3):
        with pytest.raises(ChildFailed, match="oops"):
            pool.ask({"do": "raise"})
    assert pool.ask({"do": "a"})["echo"] == "a"
    pool.close()
