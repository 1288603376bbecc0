"""What a run logs and saves during an outage of a teacher."""

from collections.abc import Callable

from opd.fleet.membership.outage import Outage, OutageHooks
from student.job.saving import LoopState, Saver
from student.run.interrupts import Interrupts


def outage_hooks(state: LoopState, saver: Saver, interrupts: Interrupts, log: Callable[[str], None]) -> OutageHooks:
    """Hooks that log an outage, and save the finished steps if it lasts.

    Args:
        state: the state of the loop.
        saver: saves the run.
        interrupts: tells whether updates are being made.
        log: called with a line for the console.
    """

    def waiting(outage: Outage) -> None:
        log(outage.sentence())

    def emergency(outage: Outage) -> None:
        if state.unfinished is not None or interrupts.holding or saver.sharded:
            return  # Updates have moved the weights, a controller may be trying others, or other ranks hold shards.
        path = saver.save(state, together=False)
        log(f"teacher {outage.teacher!r} is away for {outage.seconds:.0f} s; saved {path}")

    def recovered(outage: Outage) -> None:
        log(f"teacher {outage.teacher!r} is back after {outage.seconds:.0f} s")

    return OutageHooks(waiting=waiting, emergency=emergency, recovered=recovered)
