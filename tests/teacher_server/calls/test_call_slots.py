import asyncio
import contextlib

import pytest

from opd.errors import OverloadedError
from teacher_server.calls.call_slots import CallSlots, WaitingSlots


def test_places_are_bounded_for_a_caller_and_over_all_and_come_back() -> None:
    slots = CallSlots(3, 2)
    with contextlib.ExitStack() as held:
        held.enter_context(slots.hold("a"))
        held.enter_context(slots.hold("a"))
        assert slots.missing("a") == "caller_full"
        with pytest.raises(OverloadedError, match="2 open calls"), slots.hold("a"):
            pytest.fail("a third place was given")
        held.enter_context(slots.hold("b"))
        assert slots.missing("c") == "server_full"
        with pytest.raises(OverloadedError, match="3 open calls"), slots.hold("c"):
            pytest.fail("a fourth place was given")
    assert slots.used == 0
    assert not slots._held  # callers leave nothing behind, however many names there are


def test_a_call_that_fails_gives_its_place_back() -> None:
    slots = CallSlots(1, 1)
    with pytest.raises(ZeroDivisionError), slots.hold("a"):
        raise ZeroDivisionError
    assert slots.missing("a") == ""


async def test_whoever_holds_the_fewest_goes_first() -> None:
    slots = WaitingSlots(4, 3)
    order: list[str] = []
    release = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1", "a4", "a5", "b2", "c1")}

    async def hold(name: str) -> None:
        async with slots.wait_for(name[0]):
            order.append(name)
            await release[name].wait()

    async with asyncio.TaskGroup() as tasks:
        for name in release:
            tasks.create_task(hold(name))
            await asyncio.sleep(0)
        assert order == ["a1", "a2", "a3", "b1"]
        for name, follower in (("a1", "c1"), ("a2", "a4"), ("b1", "b2"), ("a3", "a5")):
            release[name].set()
            while follower not in order:
                await asyncio.sleep(0)
        assert order[4:] == ["c1", "a4", "b2", "a5"]
        for event in release.values():
            event.set()
    assert slots.used == 0


async def test_a_waiter_that_gives_up_takes_no_place_with_it() -> None:
    slots = WaitingSlots(1, 1)
    ran: list[str] = []

    async def hold(name: str) -> None:
        async with slots.wait_for(name):
            ran.append(name)

    async with slots.wait_for("a"):
        waiting = [asyncio.create_task(hold(name)) for name in ("b", "c", "d")]
        await asyncio.sleep(0)
        waiting[0].cancel()  # while it waits
        await asyncio.sleep(0)
    waiting[1].cancel()  # it has just been given the place, and has not run yet
    await asyncio.gather(*waiting, return_exceptions=True)
    assert ran == ["d"]
    assert slots.used == 0
