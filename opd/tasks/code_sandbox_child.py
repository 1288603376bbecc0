"""The inside of `opd.tasks.code_sandbox`: gives up every right but to compute and to print, then runs a program.

It is run by path, without the project on sys.path, so it imports only the standard library. Its arguments are the file
descriptors of the request and for notes, then seconds, MiB and bytes. The notes are a line "began" and, once the
program has failed or its tests are done, a line with the request's token and JSON. A program without tests ends as it
would by itself.
"""

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
import types
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
# System calls of Landlock, the same on all architectures; glibc has no wrappers.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPABILITY_VERSION_3 = 0x20080522
# Options of prctl: PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_DUMPABLE.
_NO_NEW_PRIVS, _SECCOMP, _DUMPABLE = 38, 22, 4

# Landlock's rights, one bit each: execute, write and read files, read directories, remove directories and files, make
# 7 kinds of files; since version 2 refer, since 3 truncate, since 5 ioctl. A kernel refuses a ruleset that names a
# right which it does not know.
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}

# System calls that a program does not need: sockets, processes, signals to others, tracing, namespaces, priority and
# memory of other processes, whatever outlives a process (System V objects, queues, keys), and ways around these.
# `clone` is allowed for threads only. In the order of their numbers: shmget shmat socket connect fork vfork execve kill
# semget msgget ptrace rt_sigqueueinfo setpriority sched_setparam sched_setscheduler pivot_root mount tkill
# sched_setaffinity mq_open add_key request_key keyctl ioprio_set migrate_pages unshare move_pages rt_tgsigqueueinfo
# perf_event_open setns process_vm_readv process_vm_writev kcmp sched_setattr bpf execveat userfaultfd pidfd_send_signal
# io_uring_setup pidfd_getfd process_madvise
_X86 = [29, 30, 41, 42, 57, 58, 59, 62, 64, 68, 101, 129, 141, 142, 144, 155, 165, 200, 203, 240, 248, 249, 250]
_X86 += [251, 256, 272, 279, 297, 298, 308, 310, 311, 312, 314, 321, 322, 323, 424, 425, 438, 440]
# ioprio_set mount pivot_root unshare ptrace sched_setparam sched_setscheduler sched_setaffinity kill tkill
# rt_sigqueueinfo setpriority mq_open msgget semget shmget shmat socket connect add_key request_key keyctl
# execve migrate_pages move_pages rt_tgsigqueueinfo perf_event_open setns process_vm_readv process_vm_writev kcmp
# sched_setattr bpf execveat userfaultfd pidfd_send_signal io_uring_setup pidfd_getfd process_madvise
# (no fork, no vfork)
_ARM = [30, 40, 41, 97, 117, 118, 119, 122, 129, 130, 138, 140, 180, 186, 190, 194, 196, 198, 203, 217, 218, 219]
_ARM += [221, 238, 239, 240, 241, 268, 270, 271, 272, 274, 280, 281, 282, 424, 425, 438, 440]
# For each machine, the AUDIT_ARCH of its system calls and their numbers.
_REFUSED = {"x86_64": (0xC000003E, _X86), "aarch64": (0xC00000B7, _ARM)}
# Calls whose first argument is a process, allowed for this process only (or 0, which means it): tgkill, with which
# Python signals its own threads and abort() the process itself, and prlimit64, with which limits are set.
_ON_PROCESS = {"x86_64": (234, 302), "aarch64": (131, 261)}
_CLONE = {"x86_64": 56, "aarch64": 220}
# A pair of stream sockets, with which asyncio wakes its loop, stays inside the process; a pair of datagram sockets
# could send to any address.
_SOCKETPAIR, _STREAM, _TYPE_BITS = {"x86_64": 53, "aarch64": 199}, 1, 0xF
# fcntl, and the commands that make a file send signals to a chosen process: F_SETOWN, F_SETSIG, F_SETOWN_EX.
_FCNTL, _SIGNALLING = {"x86_64": 72, "aarch64": 25}, (8, 10, 15)
_CLONE3, _CLONE_THREAD = 435, 0x10000
# What a seccomp filter returns: allow, kill the process, fail with EPERM, fail with ENOSYS.
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def landlock_version() -> int:
    """The kernel's version of Landlock; below 1 if it has none."""
    return int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def readable() -> list[str]:
    """Folders in which files may be read: those of the interpreter, installed packages and the system's libraries."""
    mine = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), *sys.path]
    found = {os.path.realpath(path) for path in (*mine, "/usr", "/lib", "/lib64", "/etc/localtime", "/dev/urandom")}
    return sorted(path for path in found if path != "/" and os.path.exists(path))


def drop_capabilities() -> None:
    """Give up root's privileges, such as raising limits, becoming another user, or renaming the machine.

    Raises:
        OSError: if the kernel refuses.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)  # of this process
    if _LIBC.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "giving up capabilities is refused")


def close_files() -> None:
    """Forbid writing any file, and reading files outside `readable`.

    Raises:
        OSError: if the kernel refuses.
    """
    version = landlock_version()
    handled = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    rules = struct.pack("Q", handled)
    ruleset = _call(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    for path in readable():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | (_READ_DIR | _EXECUTE if os.path.isdir(path) else 0)
        _call(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, opened), ctypes.c_uint32(0))
        os.close(opened)
    _call(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


def close_calls() -> None:
    """Forbid sockets, processes and signals to other processes, with a seccomp filter in classic BPF.

    Raises:
        OSError: if the kernel refuses.
    """
    machine = platform.machine()
    architecture, refused = _REFUSED[machine]
    # Offsets in struct seccomp_data: 0 the call's number, 4 the architecture, 16 and 24 the first two arguments. The
    # architecture is checked first, because a process may switch to another one, where the numbers mean other calls.
    code = [_load(4), _jump(0x15, architecture, 1, 0), _return(_KILL), _load(0)]
    if machine == "x86_64":
        code += [_jump(0x35, 0x40000000, 0, 1), _return(_KILL)]  # x32: the same architecture, with numbers from here on
    for number in refused:
        code += [_jump(0x15, number, 0, 1), _return(_EPERM)]
    for number in _ON_PROCESS[machine]:
        mine = [_jump(0x15, os.getpid(), 2, 0), _jump(0x15, 0, 1, 0), _return(_EPERM), _return(_ALLOW)]
        code += [_jump(0x15, number, 0, 1 + len(mine)), _load(16), *mine]
    commands = [_jump(0x15, value, len(_SIGNALLING) - at, 0) for at, value in enumerate(_SIGNALLING)]
    code += [_jump(0x15, _FCNTL[machine], 0, 3 + len(commands)), _load(24), *commands, _return(_ALLOW), _return(_EPERM)]
    code += [_jump(0x15, _SOCKETPAIR[machine], 0, 5), _load(24), struct.pack("HBBI", 0x54, 0, 0, _TYPE_BITS)]
    code += [_jump(0x15, _STREAM, 0, 1), _return(_ALLOW), _return(_EPERM)]
    # clone3 takes its flags through a pointer, which a filter cannot follow; on ENOSYS, glibc falls back to clone.
    code += [_jump(0x15, _CLONE3, 0, 1), _return(_ENOSYS)]
    code += [_jump(0x15, _CLONE[machine], 0, 3), _load(16), _jump(0x45, _CLONE_THREAD, 1, 0), _return(_EPERM)]
    code += [_return(_ALLOW)]
    program = b"".join(code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    if _LIBC.prctl(_SECCOMP, 2, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp is refused")


def _load(offset: int) -> bytes:
    """BPF_LD | BPF_W | BPF_ABS."""
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(kind: int, value: int, yes: int, no: int) -> bytes:
    """BPF_JMP with K: kind 0x15 is "equal", 0x35 "at least", 0x45 "has a bit of"; skips `yes` or `no` instructions."""
    return struct.pack("HBBI", kind, yes, no, value)


def _return(value: int) -> bytes:
    """BPF_RET | BPF_K."""
    return struct.pack("HBBI", 0x06, 0, 0, value)


def _call(number: int, *arguments: Any) -> int:
    found = int(_LIBC.syscall(number, *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), f"system call {number} is refused")
    return found


def bound(seconds: float, memory_mib: int, output_bytes: int) -> None:
    """Bound memory, time, output, core dumps and open files."""
    whole = int(seconds) + 1
    for what, most in [
        (resource.RLIMIT_AS, memory_mib * 2**20),
        (resource.RLIMIT_CPU, whole),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ]:
        resource.setrlimit(what, (most, most))
    # The default action needs no interpreter, so it also ends a program that hangs in C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main(asked: int, notes: int, seconds: float, memory_mib: int, output_bytes: int) -> None:
    """Read the request, give up all rights, run the program and its tests, and note the verdict."""
    with open(asked, "rb") as file:
        request = json.loads(file.read().decode("utf-8", "surrogatepass"))
    # A note counts only with the token. A program can find the token in this process, but cannot write it by accident.
    token = request.pop("token")
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)  # no core file, and other processes of the user cannot attach
    if _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    drop_capabilities()
    close_files()
    close_calls()
    os.write(notes, b"began\n")
    bound(seconds, memory_mib, output_bytes)
    passed: bool | None = True
    # A new module, so that code that looks names up in __main__, as pickle does, finds the program's.
    reason, sys.modules["__main__"] = "", types.ModuleType("__main__")
    space = vars(sys.modules["__main__"])
    try:
        try:
            tests = compile(request["tests"], "<tests>", "exec")
        except (SyntaxError, ValueError) as error:
            passed, reason = None, f"the tests do not compile: {error}"[:200]  # which says nothing about the program
        else:
            exec(compile(request["program"], "<program>", "exec"), space)
            if not request["tests"]:
                return  # not exiting at once, so that threads are waited for and exit handlers run
            exec(tests, space)
            sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, SystemExit) and not request["tests"]:
            raise
        passed, reason = False, f"{type(error).__name__}: {error}"[:200]
        with contextlib.suppress(BaseException):  # what it had printed says more than the error alone
            sys.stdout.flush()
    os.write(notes, f"\n{token}{json.dumps({'passed': passed, 'reason': reason})}\n".encode())
    # At once, so that no thread or exit handler of the program can change the outcome.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
