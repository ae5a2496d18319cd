"""What a job may not do, on Linux: resource limits, a system-call filter, and a fence around file writes.

Owns: rlimits, the seccomp program, the Landlock rule set, the dropping of capabilities. Standard library only: this
file is imported by `job_server`, a bare interpreter that cannot see the rest of Nonet.

Invariant: `confine` is called in the forked child just before the job's first line, and nothing it sets can be undone
by the job. What the kernel does not offer is absent from the list `confine` returns; it is never assumed.
Refuses: hiding files from reading. A job can read what its user can read; it can write only below its directory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

MEMORY = 256 << 20  # bytes of address space that a job may add to what the server holds
FILE = 1 << 20  # bytes of any one file
OPEN_FILES = 64
PROCESSES = 16  # only where the system-call filter, which forbids new processes altogether, is missing

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SIGKILL = 9
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x10000
FILTER = 2

# One column per architecture: audit id, then the numbers of the calls that are refused.
SYSCALLS: dict[str, dict[str, int]] = {
    "x86_64": {
        "audit": 0xC000003E, "fork": 57, "vfork": 58, "clone": 56, "clone3": 435, "execve": 59, "execveat": 322,
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kill": 62, "tkill": 200,
        "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
        "pidfd_open": 434, "unshare": 272, "setns": 308, "mount": 165, "io_uring_setup": 425, "bpf": 321,
        "keyctl": 250, "perf_event_open": 298, "userfaultfd": 323, "open_by_handle_at": 304,
    },
    "aarch64": {
        "audit": 0xC00000B7, "clone": 220, "clone3": 435, "execve": 221, "execveat": 281, "socket": 198,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kill": 129, "tkill": 130, "tgkill": 131,
        "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424, "pidfd_open": 434,
        "unshare": 97, "setns": 268, "mount": 40, "io_uring_setup": 425, "bpf": 280, "keyctl": 219,
        "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265,
    },
}  # fmt: skip

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446  # the same number on every architecture
WRITE_FILE = 1 << 1
# remove dir, remove file, make char/dir/reg/sock/fifo/block/sym, and from ABI 2 refer, from ABI 3 truncate
CHANGES_BY_ABI = {1: 0b1_1111_1111_0010, 2: 0b11_1111_1111_0010, 3: 0b111_1111_1111_0010}
TRUNCATE = 1 << 14


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


LIBC = _libc()


def confine(directory: str, timeout_s: float) -> list[str]:
    """Fence the calling process in; returns what holds, in words, for the `isolation` note of the runner."""
    held = ["limits"]
    _limits(timeout_s)
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        _drop_capabilities(LIBC)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        held += ["writes"] if _fence_writes(LIBC, directory) else []
        held += ["processes", "network"] if _filter_calls(LIBC) else []
    if "processes" not in held:
        _limit("RLIMIT_NPROC", PROCESSES)
    return held


_address_space = MEMORY


def allow_memory() -> None:
    """Called once the server has imported all it will: a job may have that much and MEMORY more."""
    global _address_space
    if sys.platform == "linux":
        with open("/proc/self/statm") as f:  # noqa: PTH123
            _address_space = MEMORY + int(f.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limits(timeout_s: float) -> None:
    _limit("RLIMIT_CPU", int(timeout_s) + 2)  # a second line of defence: the wall clock strikes first
    _limit("RLIMIT_AS", _address_space)
    _limit("RLIMIT_FSIZE", FILE)
    _limit("RLIMIT_NOFILE", OPEN_FILES)
    _limit("RLIMIT_CORE", 0)


def _limit(name: str, value: int) -> None:
    which = getattr(resource, name, None)
    if which is None:
        return
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    try:
        resource.setrlimit(which, (value, value))
    except (ValueError, OSError):  # macOS refuses RLIMIT_AS
        return


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """A root job loses root's powers (its files stay its own). Without capabilities to lose this does nothing."""
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    libc.capset(header, nothing)


# ------------------------------------------------------------------- writes


def _fence_writes(libc: ctypes.CDLL, directory: str) -> bool:
    """Landlock: from here on, files change only below `directory` (and /dev/null)."""
    abi = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    rights = WRITE_FILE | CHANGES_BY_ABI[min(abi, 3)]
    attributes = struct.pack("=Q", rights)
    rules = libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        _allow(libc, rules, directory, rights)
        _allow(libc, rules, os.devnull, rights & (WRITE_FILE | (TRUNCATE if abi >= 3 else 0)))
        return libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, rights: int) -> None:
    fd = os.open(path, os.O_PATH)
    try:
        libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


# ------------------------------------------------------------- system calls

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCH, FIRST_ARGUMENT = 0, 4, 16  # offsets into struct seccomp_data
Instruction = tuple[int, int, int, int]


def _program(numbers: dict[str, int]) -> tuple[bytes, tuple[int, ...]]:
    """BPF: refuse what is listed; allow threads but not processes, and signals to oneself but to nobody else.

    Returns the code and the offsets at which the job's own process id has to be filled in.
    """
    out: list[Instruction] = [
        (LOAD, 0, 0, ARCH),
        (JUMP_EQUAL, 1, 0, numbers["audit"]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_AT_LEAST, 0, 1, 0x40000000),  # the x32 interface would slip past the numbers below
        (RETURN, 0, 0, REFUSE | ENOSYS),
    ]
    own: list[int] = []
    for name, number in numbers.items():
        if name in ("clone", "kill", "tgkill"):  # allowed if their first argument is right
            own += [len(out) + 2] if name != "clone" else []
            test = (JUMP_ANY_BIT, 0, 1, CLONE_THREAD) if name == "clone" else (JUMP_EQUAL, 0, 1, 0)
            out += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, FIRST_ARGUMENT), test]
            out += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE | EPERM)]
        elif name != "audit":
            errno = ENOSYS if name == "clone3" else EPERM  # ENOSYS makes libc fall back to clone
            out += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno)]
    out.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *i) for i in out), tuple(8 * i + 4 for i in own)


def _prepare() -> tuple[bytes, tuple[int, ...]] | None:
    numbers = SYSCALLS.get(os.uname().machine)
    return _program(numbers) if numbers and sys.byteorder == "little" else None


PREPARED = _prepare() if LIBC is not None else None  # once per server, not once per job


def _filter_calls(libc: ctypes.CDLL) -> bool:
    if PREPARED is None:
        return False
    code = ctypes.create_string_buffer(PREPARED[0], len(PREPARED[0]))
    for offset in PREPARED[1]:
        struct.pack_into("=I", code, offset, os.getpid())
    header = struct.pack("@HP", len(PREPARED[0]) // 8, ctypes.addressof(code))
    return libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.c_char_p(header), 0, 0) == 0
