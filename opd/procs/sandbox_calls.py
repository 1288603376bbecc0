"""The system calls that a program in `opd.procs.sandbox` may make, as a seccomp filter in classic BPF.

The list says what is allowed: reading files, memory, threads, time, waiting, and the process itself. All else is
refused, also what later kernels add. Whatever can act on other processes, files or the machine is either not on the
list or allowed only with the arguments that cannot.

Written by hand, because a child that starts for every program cannot wait for a library to load, libseccomp is not on
every machine, and its Python binding does not choose a C library's calls for us either.
"""

from functools import cache

Instruction = tuple[int, int, int, int]
"""An operation, how many instructions to skip if its condition holds and if not, and its value (struct sock_filter)."""

OWN_PID = -1
"""A value in the filter in place of which the child puts the number of its own process."""

# Names with their numbers on x86-64 and arm64; "-" where there is no such call.
_ALLOWED = """
read 0 63, readv 19 65, pread64 17 67, preadv 295 69, preadv2 327 286, write 1 64, writev 20 66, pwrite64 18 68,
pwritev 296 70, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, open 2 -, openat 257 56, openat2 437 437, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79,
statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -,
getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, statfs 137 43, fstatfs 138 44, ftruncate 77 46,
fsync 74 82, fdatasync 75 83, umask 95 166,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, brk 12 214, madvise 28 233, msync 26 227,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday 96 169, time 201 -,
times 100 153, getitimer 36 102, setitimer 38 103, alarm 37 -, timerfd_create 283 85, timerfd_settime 286 86,
timerfd_gettime 287 87,
set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, futex 202 98, membarrier 324 283, sched_yield 24 124,
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, sched_rr_get_interval 148 127, getcpu 309 168, arch_prctl 158 -, exit 60 93,
exit_group 231 94,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, restart_syscall 219 128,
poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21,
epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19,
sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getgroups 115 158, getpgrp 111 -, getpgid 121 155, getsid 124 156, getresuid 118 148, getresgid 120 150, capget 125 90,
uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, setrlimit 160 164, getpriority 140 141,
getrandom 318 278, wait4 61 260, waitid 247 95
"""
# Calls that are allowed with some arguments, see `seccomp_filter`.
_CHECKED = """
kill 62 129, tgkill 234 131, prlimit64 302 261, clone 56 220, clone3 435 435, socketpair 53 199, fcntl 72 25,
ioctl 16 29, prctl 157 167
"""
_COLUMN = {"x86_64": 0, "aarch64": 1}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH
_X32 = 0x40000000  # on x86-64, numbers from here on are those of another set of calls
_NEWEST = 466
"""The last call of Linux 6.13. Later ones do not exist for a program, so that a later C library does without them."""

# What a filter returns: allow, kill the process, fail with EPERM, fail with ENOSYS.
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
# struct seccomp_data: the call's number, the architecture, the low halves of the first three arguments.
_NUMBER, _ARCH, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32
_EQUAL, _AT_LEAST, _HAS_A_BIT = 0x15, 0x35, 0x45

# What glibc makes a thread with, and what musl adds. No process can be made with these flags.
_THREAD, _DETACHED = 0x3D0F00, 0x400000
# A pair of stream sockets, with which asyncio wakes its loop, stays inside the process; a pair of datagram sockets
# could send to any address.
_UNIX, _STREAM, _TYPE_BITS = 1, 1, 0xF
# F_DUPFD F_GETFD F_SETFD F_GETFL F_DUPFD_CLOEXEC. Others send signals to a chosen process, or lock files.
_FCNTL, _SETFL = (0, 1, 2, 3, 1030), 4
# O_ASYNC sends signals; O_DIRECT would also be set for the process that reads what the program prints.
_ASYNC, _DIRECT = 0o20000, {"x86_64": 0o40000, "aarch64": 0o200000}
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX TCGETS2. Others send signals to a chosen process, or act on it.
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
_PRCTL = (15, 16, 0x53564D41)  # PR_SET_NAME PR_GET_NAME PR_SET_VMA


def numbers(calls: str, machine: str) -> dict[str, int]:
    """The numbers of calls on a machine, by name."""
    split = (call.split() for call in calls.replace("\n", " ").split(","))
    return {name: int(found[_COLUMN[machine]]) for name, *found in split if found[_COLUMN[machine]] != "-"}


@cache
def seccomp_filter(machine: str) -> list[Instruction]:
    """The filter for "x86_64" or "aarch64"."""
    checked = numbers(_CHECKED, machine)
    # The architecture is checked first, because a process may switch to another one, where numbers mean other calls.
    code = [_load(_ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), _return(_KILL), _load(_NUMBER)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), _return(_KILL)]
    # The kernel computes once which calls are allowed whatever their arguments, so these cost a program nothing.
    code += _one_of(list(numbers(_ALLOWED, machine).values()), otherwise=None)
    for name in ("kill", "tgkill", "prlimit64"):  # of this process only (0 means it, too)
        code += _when(checked[name], [_load(_FIRST), *_one_of([OWN_PID, 0])])
    code += _when(checked["fcntl"], _fcntl(machine))
    code += _when(checked["ioctl"], [_load(_SECOND), *_one_of(_IOCTL)])
    code += _when(checked["prctl"], [_load(_FIRST), *_one_of(_PRCTL)])
    kind = [_load(_SECOND), (0x54, 0, 0, _TYPE_BITS), *_one_of([_STREAM])]
    code += _when(checked["socketpair"], [_load(_FIRST), (_EQUAL, 1, 0, _UNIX), _return(_EPERM), *kind])
    code += _when(checked["clone"], [_load(_FIRST), *_one_of([_THREAD, _THREAD | _DETACHED])])
    # clone3 takes its flags through a pointer, which a filter cannot follow; on ENOSYS, glibc falls back to clone.
    code += [(_EQUAL, 1, 0, checked["clone3"]), (_AT_LEAST, 0, 1, _NEWEST + 1), _return(_ENOSYS), _return(_EPERM)]
    return code


def _fcntl(machine: str) -> list[Instruction]:
    flags = [_load(_THIRD), (_HAS_A_BIT, 0, 1, _ASYNC | _DIRECT[machine]), _return(_EPERM), _return(_ALLOW)]
    return [_load(_SECOND), (_EQUAL, 0, len(flags), _SETFL), *flags, *_one_of(_FCNTL)]


def _load(offset: int) -> Instruction:
    """BPF_LD | BPF_W | BPF_ABS."""
    return 0x20, 0, 0, offset


def _return(value: int) -> Instruction:
    """BPF_RET | BPF_K."""
    return 0x06, 0, 0, value


def _when(number: int, code: list[Instruction]) -> list[Instruction]:
    """Code for one call, which must return."""
    return [(_EQUAL, 0, len(code), number), *code]


def _one_of(values: list[int] | tuple[int, ...], otherwise: int | None = _EPERM) -> list[Instruction]:
    """Allow if what is loaded equals any of the values; else return `otherwise`, if it is given."""
    last = [(0x05, 0, 0, 1)] if otherwise is None else [_return(otherwise)]  # BPF_JMP | BPF_JA: skips one instruction
    return [*((_EQUAL, len(values) - at, 0, value) for at, value in enumerate(values)), *last, _return(_ALLOW)]
