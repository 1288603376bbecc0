from opd.fleet.scheduling.in_flight import ServerLoad


def test_a_pause_ends_with_the_process_that_asked_for_it() -> None:
    server = ServerLoad("a:1", 1000)
    server.pushed_back(0.0, 30.0)
    server.reset()
    assert not server.open(1.0), "a failure says nothing about the pause"
    server.restarted()
    assert server.open(1.0) and not server.refuses(1.0)
