"""Confines an answer's process: namespaces or Landlock, and seccomp. docs/collab.md has more.

A process calls these functions before it runs any untrusted code. They need no root. Each raises
OSError if the kernel or the host refuses. The caller must then end the process, because it may be
only partly confined.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
from pathlib import Path

from dialop.collab.folder import MAX_BYTES, MAX_FILES

_MAX_FILE_BYTES = 16 * 2**20
_MAX_OPEN_FILES = 256
_MAX_THREADS = 64
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_DETACH = 2
_RDONLY_ATTR, _RECURSIVE, _AT_FDCWD = 1, 0x8000, -100
# System call numbers, which are the same on all architectures. glibc has no wrappers for them.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38


def libc() -> ctypes.CDLL:
    """The C library, loaded so that ctypes saves errno."""
    return ctypes.CDLL(None, use_errno=True)


def readable() -> list[str]:
    """The paths that an answer may read: Python with its packages, and the system's libraries."""
    named = {
        str(Path(path).absolute()) for path in (sys.prefix, sys.base_prefix, *sys.path) if path
    }
    own = {os.path.realpath(path) for path in named}
    # Python looks for its packages under these names, even if they lead through a symlink.
    for path in named - own:
        if not any(path != other and Path(path).is_relative_to(other) for other in named | own):
            own.add(path)
    return sorted(path for path in {*own, *_SYSTEM} if Path(path).exists() and path != "/")


def limit(*, seconds: float, memory_bytes: int, own_users: bool) -> None:
    """Limit CPU seconds, memory, the size of a file and the number of open files; no core dumps.

    The number of threads is also limited if `own_users`: the process has its own user namespace.
    The kernel does not enforce that limit for root.
    """
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: _MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if own_users:  # outside a user namespace, this would count all threads of the user
        limits[resource.RLIMIT_NPROC] = _MAX_THREADS
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _check("prctl", libc().prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def enter_namespaces(folder: str) -> None:
    """Enter new user, mount, network, IPC and UTS namespaces.

    There is no network. The file system holds the paths of `readable`, read-only, some devices, and
    an empty `folder` in memory. `new_processes` adds a PID namespace.
    """
    c = libc()
    user, group = os.getuid(), os.getgid()
    _check("unshare", c.unshare(_NEWUSER | _NEWNS | _NEWNET | _NEWIPC | _NEWUTS))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        Path("/proc/self", name).write_text(text, encoding="ascii")
    _mount(c, None, "/", None, _REC | _PRIVATE)
    _mount(c, "tmpfs", folder, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "size=1m,mode=755")
    for path in (*readable(), *_DEVICES):
        if Path(path).exists():
            _show(c, path, folder)
    inner = Path(folder + folder)
    inner.mkdir(parents=True, exist_ok=True)
    size = f"size={MAX_BYTES},nr_inodes={MAX_FILES},mode=700"
    _mount(c, "tmpfs", str(inner), "tmpfs", _NOSUID | _NODEV | _NOEXEC, size)
    os.chdir(folder)
    _check("pivot_root", c.pivot_root(b".", b"."))
    _check("umount2", c.umount2(b".", _DETACH))
    os.chdir("/")
    _set_read_only(c, "/", flags=0)
    os.chdir(folder)


def new_processes() -> None:
    """Put the next forked process into a new PID namespace, where it sees no other process."""
    _check("unshare", libc().unshare(_NEWPID))


def landlock(folder: str) -> None:
    """Allow only reading the paths of `readable`, some devices, and all access to `folder`."""
    c = libc()
    version = _check("landlock_create_ruleset", c.syscall(_LANDLOCK_CREATE, None, 0, 1))
    # Access rights known to each ABI version: 13 at first, then refer, truncate and ioctl.
    known = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    execute, write, read, listing = 1, 2, 4, 8
    makes_devices = 1 << 6 | 1 << 11  # character and block devices
    rules = struct.pack("Q", known)
    ruleset = _check("landlock_create_ruleset", c.syscall(_LANDLOCK_CREATE, rules, len(rules), 0))
    everything = known & ~makes_devices & ~execute
    allowed = [(path, read | listing) for path in readable()]
    allowed += [(path, read | write) for path in _DEVICES] + [(folder, everything)]
    for path, rights in allowed:
        if not Path(path).exists():
            continue
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not Path(path).is_dir():
            rights &= ~listing
        rule = struct.pack("=Qi", rights, place)
        _check("landlock_add_rule", c.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(place)
    _check("prctl", c.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check("landlock_restrict_self", c.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def drop_rights() -> None:
    """Drop all capabilities, and prevent the process from gaining any."""
    c = libc()
    _check("prctl", c.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check("capset", c.capset(header, nothing))


# System calls that a computation needs, by libseccomp's names. All others fail with ENOSYS.
_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat
close close_range stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2 lseek
mmap munmap mprotect mremap madvise brk msync mincore membarrier dup dup2 dup3 pipe pipe2
select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime recvfrom recvmsg sendto shutdown
getsockopt setsockopt getsockname getpeername getdents getdents64 getcwd chdir fchdir mkdir mkdirat
rmdir unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat readlink readlinkat
ftruncate fallocate fsync fdatasync flock umask copy_file_range sendfile splice tee fadvise64
readahead getpid gettid getppid getuid geteuid getgid getegid getresuid getresgid getgroups
getpgrp getpgid getsid uname sysinfo times getrusage getrlimit getpriority sched_yield
sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
getcpu get_mempolicy capget clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
alarm getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete
pause rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait
sigaltstack restart_syscall futex futex_waitv set_robust_list get_robust_list set_tid_address rseq
arch_prctl getrandom exit exit_group wait4 waitid
"""
# Calls that can change a file without opening it. Landlock does not restrict them.
_ON_PATHS = ("chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat")
# shutil copies extended attributes with these, and accepts ENOTSUP.
_ATTRIBUTES = ("listxattr", "llistxattr", "flistxattr", "setxattr", "lsetxattr", "fsetxattr")
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicates, flags, locks, pipe size
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal queries, blocking, cloexec
_PRCTL = (15, 16, 0x53564D41)  # names of threads and of memory areas
_CLONE_THREAD = 0x10000
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL, _MASKED = 4, 7


class _Compared(ctypes.Structure):
    """libseccomp's scmp_arg_cmp: argument, comparison, and two values."""

    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def seccomp(*, own_files: bool) -> None:
    """Allow only the system calls of a computation: files, memory, threads, time.

    The process cannot start a process or a program, open a socket other than a connected pair, or
    signal another process. `own_files` allows it to set modes and times of files; otherwise these
    calls do nothing and report success.
    """
    try:
        lib = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        raise OSError(errno.ENOENT, "libseccomp.so.2 is not installed") from None
    lib.seccomp_init.restype = ctypes.c_void_p
    lib.seccomp_load.argtypes = [ctypes.c_void_p]
    lib.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.POINTER(_Compared),
    ]
    rules = lib.seccomp_init(_ERRNO | errno.ENOSYS)

    def add(name: str, *compared: tuple[int, int, int, int], action: int = _ALLOW) -> None:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # this architecture or libseccomp does not have the call
            return
        made = (_Compared * max(1, len(compared)))(*(_Compared(*one) for one in compared))
        result = lib.seccomp_rule_add_array(rules, action, number, len(compared), made)
        if result < 0:
            raise OSError(-result, f"seccomp rule {name}: {os.strerror(-result)}")

    for name in _ALLOWED.split():
        add(name)
    for name in _ON_PATHS:
        add(name, action=_ALLOW if own_files else _ERRNO | 0)
    for name in _ATTRIBUTES:
        add(name, action=_ERRNO | errno.ENOTSUP)
    for name, values in (("fcntl", _FCNTL), ("ioctl", _IOCTL)):
        for value in values:
            add(name, (1, _EQUAL, value, 0))
    for value in _PRCTL:
        add("prctl", (0, _EQUAL, value, 0))
    add("prlimit64", (0, _EQUAL, 0, 0))
    add("clone", (0, _MASKED, _CLONE_THREAD, _CLONE_THREAD))
    add("socketpair", (0, _EQUAL, 1, 0), (1, _MASKED, 0xF, 1))  # AF_UNIX, SOCK_STREAM
    for name in ("kill", "tgkill"):
        add(name, (0, _EQUAL, os.getpid(), 0))
    result = lib.seccomp_load(rules)
    if result < 0:
        raise OSError(-result, f"seccomp: {os.strerror(-result)}")


def _show(c: ctypes.CDLL, path: str, root: str) -> None:
    """Mount `path` at the same place under `root`, read-only unless it is a device."""
    inner = Path(root + path)
    if Path(path).is_symlink():
        inner.parent.mkdir(parents=True, exist_ok=True)
        inner.symlink_to(os.path.realpath(path))  # links between the two are not shown
        return
    if Path(path).is_dir():
        inner.mkdir(parents=True, exist_ok=True)
    else:
        inner.parent.mkdir(parents=True, exist_ok=True)
        inner.touch()
    _mount(c, path, str(inner), None, _BIND | _REC)
    if path not in _DEVICES:
        _set_read_only(c, str(inner), flags=_RECURSIVE)


def _set_read_only(c: ctypes.CDLL, path: str, *, flags: int) -> None:
    wanted = struct.pack("QQQQ", _RDONLY_ATTR, 0, 0, 0)
    result = c.syscall(
        _MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, wanted, ctypes.c_size_t(len(wanted))
    )
    _check(f"mount_setattr {path}", result)


def _mount(
    c: ctypes.CDLL, source: str | None, target: str, kind: str | None, flags: int, data: str = ""
) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    result = c.mount(*texts, ctypes.c_ulong(flags), os.fsencode(data) or None)
    _check(f"mount {target}", result)


def _check(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
