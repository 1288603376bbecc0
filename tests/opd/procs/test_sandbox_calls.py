"""The filter of system calls, run here as the kernel runs it, for both machines."""

import os

import pytest

from opd.procs.sandbox_calls import OWN_PID, seccomp_filter

ALLOWED, KILLED, REFUSED, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
GLIBC_THREAD = 0x3D0F00

CALLS = {
    "x86_64": {"read": 0, "futex": 202, "kill": 62, "tgkill": 234, "prlimit64": 302, "clone": 56, "socketpair": 53}
    | {"fcntl": 72, "ioctl": 16, "prctl": 157, "socket": 41, "execve": 59, "fchmodat": 268, "ptrace": 101},
    "aarch64": {"read": 63, "futex": 98, "kill": 129, "tgkill": 131, "prlimit64": 261, "clone": 220, "socketpair": 199}
    | {"fcntl": 25, "ioctl": 29, "prctl": 167, "socket": 198, "execve": 221, "fchmodat": 53, "ptrace": 117},
}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter returns for a call."""
    low = [argument & 0xFFFFFFFF for argument in (*arguments, 0, 0, 0)]
    seen = {
        0: number,
        4: MACHINES[machine] if architecture is None else architecture,
        16: low[0],
        24: low[1],
        32: low[2],
    }
    code, at, loaded = seccomp_filter(machine), 0, 0
    while True:
        operation, yes, no, value = code[at]
        value = os.getpid() if value == OWN_PID else value
        if operation == 0x06:
            return value
        if operation == 0x20:
            loaded = seen[value]
        elif operation == 0x54:
            loaded &= value
        elif operation == 0x05:
            at += value
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[operation]
            at += yes if holds else no
        at += 1


@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_is_refused_unless_it_is_listed(machine: str) -> None:
    numbers = CALLS[machine]
    assert all(verdict(machine, numbers[name]) == ALLOWED for name in ("read", "futex"))
    assert all(verdict(machine, numbers[name]) == REFUSED for name in ("socket", "execve", "fchmodat", "ptrace"))
    assert sum(verdict(machine, number) == ALLOWED for number in range(1000)) < 160
    assert verdict(machine, 600) == verdict(machine, 435) == UNKNOWN  # a later C library falls back to what there is
    assert verdict(machine, numbers["read"], architecture=0x40000003) == KILLED
    if machine == "x86_64":
        assert verdict(machine, 0x40000000) == KILLED


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_and_limits_are_for_the_process_itself(machine: str) -> None:
    for name in ("kill", "tgkill", "prlimit64"):
        number = CALLS[machine][name]
        assert verdict(machine, number, os.getpid()) == verdict(machine, number, 0) == ALLOWED
        assert verdict(machine, number, os.getppid()) == verdict(machine, number, -1) == REFUSED


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_makes_threads_as_libraries_do_and_nothing_else(machine: str) -> None:
    clone = CALLS[machine]["clone"]
    assert verdict(machine, clone, GLIBC_THREAD) == verdict(machine, clone, GLIBC_THREAD | 0x400000) == ALLOWED
    for flags in (17, 0x8000 | 17, GLIBC_THREAD & ~0x10000, GLIBC_THREAD | 0x1000, GLIBC_THREAD | 0x10000000):
        assert verdict(machine, clone, flags) == REFUSED, hex(flags)


@pytest.mark.parametrize("machine", MACHINES)
def test_files_and_sockets_signal_no_process_and_keep_their_modes(machine: str) -> None:
    fcntl, ioctl, pair = (CALLS[machine][name] for name in ("fcntl", "ioctl", "socketpair"))
    direct = {"x86_64": 0o40000, "aarch64": 0o200000}[machine]
    assert verdict(machine, fcntl, 0, 4, 0o4000) == verdict(machine, fcntl, 0, 1030) == ALLOWED
    assert verdict(machine, fcntl, 0, 4, 0o20000) == verdict(machine, fcntl, 0, 4, direct) == REFUSED
    assert all(verdict(machine, fcntl, 0, command) == REFUSED for command in (5, 6, 7, 8, 10, 15, 1024, 1026))
    assert verdict(machine, ioctl, 0, 0x5421) == ALLOWED
    assert all(verdict(machine, ioctl, 0, command) == REFUSED for command in (0x8901, 0x8902, 0x5452, 0x5412))
    assert verdict(machine, pair, 1, 1 | 0o2000000) == ALLOWED
    assert all(verdict(machine, pair, *kind) == REFUSED for kind in ((1, 2), (1, 5), (2, 1)))
    assert verdict(machine, CALLS[machine]["prctl"], 1) == REFUSED
