from opd.fleet.scheduling.in_flight import ServerLoad


def test_a_pause_ends_with_the_process_that_asked_for_it() -> None:
    server = ServerLoad("a:1", 1000)
    server.pushed_back(0.0, 30.0, -1.0)
    server.reset()
    assert not server.open(1.0), "a failure says nothing about the pause"
    server.restarted()
    assert server.open(1.0) and not server.refuses(1.0)


def test_refusals_of_what_was_sent_together_halve_the_window_once() -> None:
    server = ServerLoad("a:1", 1000)
    server.window = 800.0
    for _ in range(4):
        server.pushed_back(1.0, 1.1, 0.9)
    assert server.window == 400.0 and server.refusals == 1
    server.pushed_back(1.3, 1.4, 1.2)
    assert server.refusals == 2 and server.window == 200.0, (
        "what was sent after that, and is refused as well, asks for less"
    )
