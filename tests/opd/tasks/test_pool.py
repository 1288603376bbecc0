import threading

import pytest

from opd.tasks.pool import WorkerPool
from opd.tasks.worker import CheckFailed


def test_as_many_processes_run_as_there_are_callers_up_to_the_limit(bad_checks):
    pool = WorkerPool(bad_checks, timeout=60.0, most=2)
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
    pool = WorkerPool(bad_checks, timeout=600.0, most=2)
    failed = []

    def hang():
        try:
            pool.ask({"do": "hang"})
        except CheckFailed as error:
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
    pool = WorkerPool(bad_checks, timeout=60.0, most=1)
    for _ in range(3):
        with pytest.raises(CheckFailed, match="oops"):
            pool.ask({"do": "raise"})
    assert pool.ask({"do": "a"})["echo"] == "a"
    pool.close()
