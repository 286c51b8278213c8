"""macOS on Apple silicon as Python's standard library and psutil show it.

Names that Linux alone has are gone, ``/proc`` and its like hold nothing, programs and libraries of
Linux are not found. A request of allhands for one of them fails as on a Mac, and is written down.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib
import multiprocessing
import os
import platform
import resource
import select
import selectors
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections import namedtuple
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mac_journal
import psutil

MEMORY_BYTES = 32 << 30
# Modules that choose by the system when they are imported have to find the real one.
_CHOSEN_EARLY = (asyncio, multiprocessing, sysconfig, urllib.request)

# A module and names that it has on Linux alone, a line each.
LINUX_ONLY = """
os sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler
os sched_setscheduler sched_rr_get_interval pidfd_open memfd_create eventfd eventfd_read
os eventfd_write copy_file_range splice getrandom posix_fadvise posix_fallocate fdatasync getxattr
os setxattr listxattr removexattr pipe2 setresuid setresgid getresuid getresgid waitid unshare
os setns O_DIRECT O_TMPFILE O_PATH O_NOATIME O_LARGEFILE O_RSYNC P_PIDFD RWF_NOWAIT
os RWF_HIPRI RWF_DSYNC RWF_SYNC RWF_APPEND SCHED_BATCH SCHED_IDLE
signal SIGPWR SIGSTKFLT SIGPOLL SIGCLD SIGRTMIN SIGRTMAX pidfd_send_signal sigtimedwait
signal sigwaitinfo
socket SO_BINDTODEVICE SO_PEERCRED SO_DOMAIN SO_PROTOCOL SO_MARK SO_PASSCRED SO_PRIORITY
socket SO_INCOMING_CPU SCM_CREDENTIALS TCP_USER_TIMEOUT TCP_KEEPIDLE TCP_QUICKACK TCP_CORK
socket TCP_DEFER_ACCEPT TCP_LINGER2 TCP_SYNCNT TCP_WINDOW_CLAMP TCP_CONGESTION TCP_INFO AF_NETLINK
socket AF_PACKET AF_ALG AF_VSOCK MSG_NOSIGNAL MSG_ERRQUEUE MSG_MORE MSG_CMSG_CLOEXEC SOCK_CLOEXEC
socket SOCK_NONBLOCK IP_TRANSPARENT
fcntl F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS
fcntl F_NOTIFY F_SETSIG F_GETSIG F_SETLEASE F_GETLEASE LOCK_MAND
resource prlimit RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME RLIMIT_SIGPENDING RLIMIT_MSGQUEUE
resource RUSAGE_THREAD
mmap MAP_POPULATE MAP_DENYWRITE MAP_EXECUTABLE MAP_STACK MADV_HUGEPAGE MADV_NOHUGEPAGE
mmap MADV_DONTDUMP MADV_DODUMP MADV_DONTFORK MADV_DOFORK MADV_MERGEABLE MADV_UNMERGEABLE
mmap MADV_HWPOISON MADV_REMOVE
time CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid
errno EBADFD ECOMM EREMOTEIO ENOTUNIQ EUCLEAN ENOMEDIUM ERESTART ENONET
"""
_FOLDERS = ("/proc", "/sys", "/dev/shm", "/run", "/etc/os-release", "/etc/machine-id")
# Of the C library, where allhands asks it by name.
_SYMBOLS = ("prctl", "mallopt", "malloc_trim", "sched_setaffinity", "gettid", "epoll_create")
# Programs that macOS or its developer tools have, and the Python that runs this.
_PROGRAMS = """
sh bash zsh env uname ps df stat date cp mv rm mkdir cat tail head sed awk grep sort tar open ssh
ssh-keygen ssh-keyscan ssh-add scp rsync sysctl vm_stat pmset system_profiler networksetup
ifconfig route netstat lsof sw_vers caffeinate xcode-select git cc clang make python3
"""
_FROM_OTHERS = ("mpirun",)  # which a Mac may have, too: this one has not
_OPTIONS = {
    "ps": ("--sort", "--no-headers", "--pid", "--ppid", "--forest"),
    "sed": ("-r", "--regexp-extended", "-i", "--in-place", "-z"),
    "stat": ("-c", "--format", "--printf"),
    "df": ("--output", "-B1", "--block-size", "-T"),
    "date": ("-d", "--date", "--iso-8601", "+%s%N", "+%N"),
    "cp": ("--reflink", "--parents", "-u", "--sparse", "-t"),
    "rsync": ("--info", "--append-verify", "--zstd", "--open-noatime", "--mkpath", "--fsync"),
    "tail": ("--pid",),
    "grep": ("-P",),
}
_LOADED_FROM = ("LD_PRELOAD", "LD_LIBRARY_PATH")
_PATH_BYTES = 104  # of a local socket, with the zero at its end; Linux has 108


def install() -> None:
    """Turn this process into one on a Mac; its children become such by the same ``PYTHONPATH``."""
    assert all(_CHOSEN_EARLY)
    for line in LINUX_ONLY.strip().splitlines():
        module, *names = line.split()
        found = importlib.import_module(module)
        for name in names:
            if hasattr(found, name):
                delattr(found, name)
    for name in [name for name in dir(select) if "epoll" in name.lower()]:
        delattr(select, name)
    selectors.DefaultSelector = selectors.PollSelector  # kqueue on a Mac, which Linux lacks
    tempfile._O_TMPFILE_WORKS = False  # O_TMPFILE is gone, which it may have seen
    _name_the_system()
    _count_as_macos()
    _hide_files()
    _limit_psutil()
    _take_children_along()
    sys.addaudithook(_watch)


# --- names and units ------------------------------------------------------------------------------


def _name_the_system() -> None:
    facts = os.uname()
    words = ("Darwin", facts.nodename, "24.5.0", "Darwin Kernel Version 24.5.0", "arm64")
    named = os.uname_result(words)
    os.uname = lambda: named
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    platform.machine = lambda: "arm64"
    platform.processor = lambda: "arm"
    platform.release = lambda: "24.5.0"
    platform.platform = lambda *_, **__: "macOS-15.5-arm64-arm-64bit"
    platform.mac_ver = lambda *_, **__: ("15.5", ("", "", ""), "arm64")
    platform.freedesktop_os_release = _missing("/etc/os-release")
    importlib.import_module("multiprocessing.context")
    multiprocessing.set_start_method("spawn", force=True)


@contextmanager
def on_the_real_system() -> Generator[None]:
    """Show the real system for the block: a package is imported that needs its libraries."""
    named, sys.platform = platform.system, "linux"
    platform.system = lambda: "Linux"
    try:
        yield
    finally:
        platform.system, sys.platform = named, "darwin"


def _missing(name: str) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> Any:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    return fails


def _count_as_macos() -> None:
    getrusage, sysconf = resource.getrusage, os.sysconf

    def used(who: int) -> resource.struct_rusage:
        facts = list(getrusage(who))
        facts[2] *= 1024  # ru_maxrss: bytes on a Mac, KiB on Linux
        return resource.struct_rusage(facts)

    def setting(name: str | int) -> int:
        if name in ("SC_AVPHYS_PAGES",):
            raise ValueError("unrecognized configuration name")
        return MEMORY_BYTES // 16384 if name == "SC_PHYS_PAGES" else (
            16384 if name in ("SC_PAGE_SIZE", "SC_PAGESIZE") else sysconf(name)
        )  # fmt: skip

    resource.getrusage, os.sysconf = used, setting
    for name in [name for name in os.confstr_names if name.startswith("CS_GNU")]:
        del os.confstr_names[name]
    symbol = ctypes.CDLL.__getattr__

    def resolved(library: ctypes.CDLL, name: str) -> Any:
        if name in _SYMBOLS:
            if where := mac_journal.caller():
                mac_journal.note("symbol", name, where)
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return symbol(library, name)

    ctypes.CDLL.__getattr__ = resolved


# --- files ----------------------------------------------------------------------------------------


def _is_linux_file(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return text.startswith(_FOLDERS) and text.partition("/run")[2][:1] in ("", "/")


def _hide(path: object) -> None:
    """Raise what a Mac raises for a file of Linux that allhands asks for."""
    if _is_linux_file(path) and (where := mac_journal.caller()):
        mac_journal.note("file", os.fsdecode(path), where)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _hide_files() -> None:
    # Python reports the opening of files to audit hooks, and none of these.
    for name in ("stat", "lstat", "access", "readlink", "statvfs"):
        real = getattr(os, name)

        def asks(path: Any, *more: Any, real: Any = real, **options: Any) -> Any:
            if _is_linux_file(path) and mac_journal.caller() and real is _access:
                return False
            _hide(path)
            return real(path, *more, **options)

        setattr(os, name, asks)


_access = os.access


# --- processes, libraries, sockets ----------------------------------------------------------------


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "glob.glob"):
        _hide(arguments[0])
    elif event in ("subprocess.Popen", "os.posix_spawn"):
        program, words, *_, variables = arguments
        _check_program(program, words, variables)
    elif event == "os.exec":
        _check_program(arguments[0], arguments[1], arguments[2])
    elif event == "ctypes.dlopen":
        _check_library(arguments[0])
    elif event in ("socket.bind", "socket.connect"):
        _check_address(arguments[1])


def _take_children_along() -> None:
    """Let children that start without their environment be on the Mac, too."""
    real = subprocess.Popen.__init__

    def starts(self: Any, args: Any, *more: Any, **options: Any) -> None:
        if isinstance(args, list | tuple) and args and args[0] == sys.executable:
            args = [word for word in args if word not in ("-I", "-S", "-E")]
        real(self, args, *more, **options)

    subprocess.Popen.__init__ = starts


def _check_program(program: Any, words: Sequence[Any], variables: Any) -> None:
    where = mac_journal.caller()
    if where is None:
        return
    name = os.path.basename(os.fsdecode(program))
    if not (name in _PROGRAMS.split() or name.startswith("python")):
        if name not in _FROM_OTHERS:
            mac_journal.note("program", name, where)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    for word in map(os.fsdecode, words[1:]):
        if word.split("=")[0] in _OPTIONS.get(name, ()):
            mac_journal.note("option", f"{name} {word}", where)
    if isinstance(variables, Mapping):
        names = {os.fsdecode(each) for each in variables}
        for each in names.intersection(_LOADED_FROM) - os.environ.keys():
            mac_journal.note("variable", each, where)


def _check_library(name: Any) -> None:
    where = mac_journal.caller()
    if where is not None and name is not None:
        mac_journal.note("library", name, where)
        raise OSError(f"dlopen({name}, 0x0006): tried: '{name}' (no such file)")


def _check_address(address: Any) -> None:
    if isinstance(address, str | bytes) and (where := mac_journal.caller()):
        path = os.fsencode(address)
        if path.startswith(b"\0") or len(path) >= _PATH_BYTES:
            mac_journal.note("socket", path, where)
            raise OSError("AF_UNIX path too long")


# --- psutil ---------------------------------------------------------------------------------------


def _limit_psutil() -> None:
    """Take away what psutil has on Linux alone, and let it tell the memory of the Mac."""
    for name in ("cpu_affinity", "io_counters", "rlimit", "memory_maps", "ionice", "cpu_num"):
        delattr(psutil.Process, name)
    fields = "total available percent used free active inactive wired"
    memory = psutil.virtual_memory
    svmem = namedtuple("svmem", fields)
    pmem = namedtuple("pmem", "rss vms pfaults pageins")
    pfullmem = namedtuple("pfullmem", "rss vms pfaults pageins uss")
    scputimes = namedtuple("scputimes", "user nice system idle")
    own, full, times = psutil.Process.memory_info, psutil.Process.memory_full_info, psutil.cpu_times

    def of_computer() -> Any:
        free = min(memory().available, MEMORY_BYTES // 2) // 16384 * 16384
        half = MEMORY_BYTES - free
        return svmem(MEMORY_BYTES, free, 50.0, half, free, free, free // 2, half // 2)

    def of_process(process: psutil.Process) -> Any:
        return pmem(*own(process)[:2], 0, 0)

    def all_of_process(process: psutil.Process) -> Any:
        found = full(process)
        return pfullmem(found.rss, found.vms, 0, 0, found.uss)

    def of_cores(percpu: bool = False) -> Any:
        found = times(percpu=percpu)
        chosen = [
            scputimes(x.user, x.nice, x.system, x.idle) for x in (found if percpu else [found])
        ]
        return chosen if percpu else chosen[0]

    psutil.virtual_memory, psutil.cpu_times = of_computer, of_cores
    psutil.Process.memory_info, psutil.Process.memory_full_info = of_process, all_of_process
