"""Which system calls a sandboxed program may make: an allow-list, written as a program for the kernel's filter machine.

What is not listed is refused: with EPERM if this file knows its number, with ENOSYS if it is newer, so that programs fall back. A few calls
are looked into: no new namespace through `clone`, no input pushed into a terminal, no socket family that leaves the network namespace
(vsock), no limits of another process. Read next: `birth.py`, which installs it last of all.
"""

from __future__ import annotations

import struct

from gnomon.sandbox.ns import calls, syscalls

EPERM, ENOSYS = 1, 38
ALLOW = 0x7FFF0000
REFUSE = 0x00050000

ALLOWED = """
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64 pwrite64 readv
writev access pipe select sched_yield mremap msync mincore madvise dup dup2 pause nanosleep getitimer alarm setitimer getpid sendfile
connect accept sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname getpeername setsockopt getsockopt fork vfork execve exit
wait4 kill uname fcntl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename mkdir rmdir creat link unlink symlink
readlink chmod fchmod chown fchown lchown umask gettimeofday getrlimit getrusage sysinfo times ptrace getuid getgid setuid setgid geteuid
getegid setpgid getppid getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid setfsuid
setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend sigaltstack utime mknod statfs fstatfs
getpriority setpriority sched_setparam sched_getparam sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
sched_rr_get_interval mlock munlock mlockall munlockall prctl arch_prctl setrlimit chroot sync gettid readahead setxattr lsetxattr
fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr fremovexattr tkill time futex
sched_setaffinity sched_getaffinity io_setup io_destroy io_getevents io_submit io_cancel epoll_create getdents64 set_tid_address
restart_syscall fadvise64 timer_create timer_settime timer_gettime timer_getoverrun timer_delete clock_gettime clock_getres
clock_nanosleep exit_group epoll_wait epoll_ctl tgkill utimes mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
waitid ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch openat mkdirat mknodat fchownat futimesat newfstatat unlinkat
renameat linkat symlinkat readlinkat fchmodat faccessat pselect6 ppoll set_robust_list get_robust_list splice tee sync_file_range
utimensat epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4 signalfd4 eventfd2 epoll_create1
dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo recvmmsg syncfs sendmmsg getcpu process_vm_readv process_vm_writev sched_setattr
sched_getattr renameat2 seccomp getrandom memfd_create execveat membarrier mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect
pkey_alloc pkey_free statx io_pgetevents rseq pidfd_send_signal pidfd_open close_range openat2 faccessat2 process_madvise epoll_pwait2
landlock_create_ruleset landlock_add_rule landlock_restrict_self process_mrelease futex_waitv cachestat fchmodat2 map_shadow_stack
futex_wake futex_wait futex_requeue mseal setxattrat getxattrat listxattrat removexattrat
"""

SYSTEM_V = "semget semop semctl semtimedop shmget shmat shmctl shmdt msgget msgsnd msgrcv msgctl"
"""Memory of these outlives its process; it is allowed where a memory cgroup counts it."""

NEW_NAMESPACES = 0x7E020000
FAMILIES = (1, 2, 10)
NETLINK, NETLINK_ROUTE = 16, 0
TERMINAL_INPUT = (0x5412, 0x541C)
PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0x0040000, 0xFFFFFFFF)
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
Instruction = tuple[int, int, int, int]


def argument(index: int, high: bool = False) -> int:
    """Where half of an argument lies in what the filter sees (little end first)."""
    return 16 + 8 * index + (4 if high else 0)


def refuse(error: int) -> Instruction:
    """Return an error to the program."""
    return (RETURN, 0, 0, REFUSE | error)


def allow() -> Instruction:
    """Let the call through."""
    return (RETURN, 0, 0, ALLOW)


def one_of(offset: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allow if a 32-bit word is among the values, else EPERM."""
    tests = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [(LOAD, 0, 0, offset), *tests, refuse(EPERM), allow()]


def looked_into() -> dict[str, list[Instruction]]:
    """The calls whose arguments decide, and the instructions that do."""
    return {
        "clone": [(LOAD, 0, 0, argument(0)), (ANY_BIT, 0, 1, NEW_NAMESPACES), refuse(EPERM), allow()],
        "clone3": [refuse(ENOSYS)],  # its flags lie in memory that a filter cannot read; libraries fall back to clone
        "ioctl": [(LOAD, 0, 0, argument(1)), (EQUAL, 1, 0, TERMINAL_INPUT[0]), (EQUAL, 0, 1, TERMINAL_INPUT[1]), refuse(EPERM), allow()],
        "personality": one_of(argument(0), PERSONALITIES),
        "prlimit64": [(LOAD, 0, 0, argument(0)), (EQUAL, 1, 0, 0), refuse(EPERM), allow()],
        "socket": [
            (LOAD, 0, 0, argument(0)), (EQUAL, 0, 3, NETLINK), (LOAD, 0, 0, argument(2)), (EQUAL, 4, 0, NETLINK_ROUTE), refuse(EPERM),
            (EQUAL, 2, 0, FAMILIES[0]), (EQUAL, 1, 0, FAMILIES[1]), (EQUAL, 0, 1, FAMILIES[2]), allow(), refuse(EPERM),
        ],
        "socketpair": one_of(argument(0), FAMILIES),
    }  # fmt: skip


def ranges(allowed: set[int], known: set[int]) -> list[tuple[int, Instruction]]:
    """Consecutive numbers with one answer, as (first number, answer)."""
    found: list[tuple[int, Instruction]] = []
    for number in range(max(known) + 2):
        answer = allow() if number in allowed else refuse(EPERM if number in known else ENOSYS)
        if not found or found[-1][1] != answer:
            found.append((number, answer))
    return found


def search(answers: list[tuple[int, Instruction]]) -> list[Instruction]:
    """A binary search for the range that a number lies in."""
    if len(answers) == 1:
        return [answers[0][1]]
    middle = len(answers) // 2
    left, right = search(answers[:middle]), search(answers[middle:])
    return [(AT_LEAST, len(left), 0, answers[middle][0]), *left, *right]


def program(machine: str, system_v: bool) -> bytes:
    """The whole filter as the kernel takes it. `system_v` allows shared memory, semaphores and queues of System V."""
    numbers = syscalls.numbers(machine)
    names = set(ALLOWED.split()) | (set(SYSTEM_V.split()) if system_v else set())
    steps: list[Instruction] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT[machine]), refuse(ENOSYS), (LOAD, 0, 0, 0)]
    if machine == "x86_64":  # the x32 numbering
        steps += [(AT_LEAST, 0, 1, 0x40000000), refuse(ENOSYS)]
    for name, body in looked_into().items():
        if name in numbers:
            steps += [(EQUAL, 0, len(body), numbers[name]), *body]
    steps += search(ranges({numbers[name] for name in names if name in numbers}, set(numbers.values())))
    if len(steps) > 4096 or any(not (0 <= jump <= 255) for step in steps for jump in step[1:3]):
        raise OSError("the filter is too long for the kernel")
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


def install(code: bytes) -> None:
    """Put the filter on this process and all that it starts. It cannot be taken off."""
    calls.install_filter(code)
