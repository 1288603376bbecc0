"""The inside of `opd.procs.sandbox`: gives up every right but to compute and to print, then runs a program.

It is run by path, without the project on sys.path, so it imports only the standard library. Its arguments are the file
descriptors of the request and for notes, then seconds, MiB and bytes. The notes are a line "began" and, once the
program has failed or its tests are done, the request's token with "passed", or with "failed" and the reason. A program
without tests ends as it would by itself. An error before "began" goes to standard error.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import sysconfig
import types

_LIBC = ctypes.CDLL(None, use_errno=True)
# System calls of Landlock, the same on all architectures; glibc has no wrappers.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPABILITY_VERSION_3 = 0x20080522
# Options of prctl: PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS.
_PARENT_DEATH, _DUMPABLE, _SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
# Numbers of users from here on are left free by systems; CLONE_NEWUSER.
_NEW_USER, _NEW_NAMESPACE = 1 << 31, 0x10000000

# What Landlock forbids, by its version: rights on files, TCP, and what leaves the process. Rights on files are one bit
# each: execute, write and read files, read directories, remove directories and files, make 7 kinds of files; then
# refer, truncate, ioctl. TCP: bind, connect. What leaves: abstract unix sockets, signals. A kernel refuses a ruleset
# that names what it does not know.
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FORBIDDEN = {
    1: ((1 << 13) - 1,),
    2: ((1 << 14) - 1,),
    3: ((1 << 15) - 1,),
    4: ((1 << 15) - 1, 0b11),
    5: ((1 << 16) - 1, 0b11),
    6: ((1 << 16) - 1, 0b11, 0b11),
}


def landlock_version() -> int:
    """The kernel's version of Landlock; below 1 if it has none."""
    return int(_LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def has_seccomp() -> bool:
    """Whether the kernel takes filters of system calls: then it looks for one at the address 0."""
    return bool(_LIBC.prctl(_SECCOMP, 2, None, 0, 0)) and ctypes.get_errno() == errno.EFAULT


def readable() -> list[str]:
    """Folders in which files may be read: those of the interpreter, installed packages and the system's libraries."""
    mine = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), *sys.path]
    found = {os.path.realpath(path) for path in (*mine, "/usr", "/lib", "/lib64", "/etc/localtime", "/dev/urandom")}
    return sorted(path for path in found if path != "/" and os.path.exists(path))


def count_alone() -> bool:
    """Have the threads of this process counted apart from those of the user's other processes, if the kernel lets it.

    It counts them for each real user in each user namespace, and holds all but root to the limit.
    """
    try:
        os.setresuid(_NEW_USER + os.getpid(), -1, -1)  # files are opened as the effective user, which stays
    except OSError:
        return int(_LIBC.unshare(_NEW_NAMESPACE)) == 0
    return True


def drop_capabilities() -> None:
    """Give up root's privileges, such as raising limits, becoming another user, or renaming the machine.

    Raises:
        OSError: if the kernel refuses.
    """
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)  # of this process
    if _LIBC.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "giving up capabilities is refused")


def close_files() -> None:
    """Forbid writing any file, reading files outside `readable`, and, where the kernel can, TCP and signals to others.

    Raises:
        OSError: if the kernel refuses.
    """
    version = landlock_version()
    forbidden = _FORBIDDEN[max(known for known in _FORBIDDEN if known <= version)]
    rules = struct.pack(f"{len(forbidden)}Q", *forbidden)
    ruleset = _call(_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint32(0))
    for path in readable():
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _READ_FILE | (_READ_DIR | _EXECUTE if os.path.isdir(path) else 0)
        _call(_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, opened), ctypes.c_uint32(0))
        os.close(opened)
    _call(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)


def close_calls(code: list[tuple[int, int, int, int]]) -> None:
    """Forbid all system calls but those that a filter of `opd.procs.sandbox_calls` allows.

    Raises:
        OSError: if the kernel refuses.
    """
    # A negative value stands for this process.
    program = b"".join(struct.pack("HBBI", op, yes, no, os.getpid() if k < 0 else k) for op, yes, no, k in code)
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    if _LIBC.prctl(_SECCOMP, 2, header, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp is refused")


def _call(number: int, *arguments: object) -> int:
    found = int(_LIBC.syscall(number, *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), f"system call {number} is refused")
    return found


def bound(seconds: float, memory_mib: int, output_bytes: int, threads: int) -> None:
    """Bound memory, processor time, output, core dumps, open files and, unless `threads` is 0, threads."""
    whole = int(seconds) + 1
    for what, most in [
        (resource.RLIMIT_AS, memory_mib * 2**20),
        (resource.RLIMIT_CPU, whole),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ]:
        resource.setrlimit(what, (most, most))
    if threads:
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def main(asked: int, notes: int, seconds: float, memory_mib: int, output_bytes: int) -> None:
    """Read the request, give up all rights, run the program and its tests, and note the verdict."""
    with open(asked, "rb") as file:
        request = json.loads(file.read())
    alone = count_alone()
    # Else a program that cancels its alarm would go on without a process that watches it.
    _LIBC.prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    _LIBC.prctl(_DUMPABLE, 0, 0, 0, 0)  # no core file, and other processes of the user cannot attach
    if _LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    drop_capabilities()
    close_files()
    close_calls(request["calls"])
    bound(seconds, memory_mib, output_bytes, request["threads"] if alone else 0)
    tests = None
    if request["tests"]:
        try:
            tests = compile(request["tests"], "<tests>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
            sys.exit(f"the tests do not compile: {error}")  # which says nothing about the program
    # A verdict counts only with the token. A program can find it in this process, but cannot write it by accident.
    token = request["token"].encode()
    os.write(notes, b"began\n")
    # The default action needs no interpreter, so it also ends a program that hangs in C.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # A new module, so that code that looks names up in __main__, as pickle does, finds the program's.
    verdict, sys.modules["__main__"] = b"passed", types.ModuleType("__main__")
    space = vars(sys.modules["__main__"])
    try:
        exec(compile(request["program"], "<program>", "exec"), space)
        if tests is None:
            return  # not exiting at once, so that threads are waited for and exit handlers run
        exec(tests, space)
        sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, SystemExit) and tests is None:
            raise
        verdict = b"failed" + _clause(error)
        with contextlib.suppress(BaseException):  # what it had printed says more than the error alone
            sys.stdout.flush()
    os.write(notes, token + verdict)
    # At once, so that no thread or exit handler of the program can change the outcome.
    os._exit(0)


def _clause(error: BaseException) -> bytes:
    """What was raised, however its class writes it, in UTF-8."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:
        text = type(error).__name__
    return text[:200].encode("utf-8", "backslashreplace")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
