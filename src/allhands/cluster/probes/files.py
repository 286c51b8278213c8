"""Files that ``allhands cluster sync`` copies: compared by SHA-256, sent by rsync, put into place
once verified.

rsync writes to a hidden directory below the root of the files, under names that need no quoting. A
file gets its own name once its hash is right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any, cast

from allhands.cluster.probes.computer import user_name
from allhands.cluster.probes.tools import program_environment
from allhands.cluster.probes.trees import cache_place, hub_place
from allhands.runtime.threads import in_background, side_by_side

# Options that Samba's rsync (since the 2.6.9 of earlier Macs) and openrsync (macOS 15.4 and later)
# both have.
RSYNC_OPTIONS = ("-r", "-L", "-I", "--partial", "--stats", "--timeout=120")
STAGING = ".allhands-sync"
# Runs rsync on the computer that receives; a shell there may print something before the mark.
MARK = "allhands-sync-begins"
RECEIVE = (
    f'printf "\\n{MARK}\\n"; cd "$1" || exit; shift; unset RSYNC_PARTIAL_DIR; LC_ALL=C exec "$@"'
)
SKIP = f"while IFS= read -r line; do case $line in *{MARK}) break;; esac; done; exec cat"
_INSTALL = {
    "brew": "brew install",
    "apt-get": "sudo apt-get install -y",
    "dnf": "sudo dnf install -y",
    "yum": "sudo yum install -y",
    "zypper": "sudo zypper install -y",
    "pacman": "sudo pacman -S --noconfirm",
    "apk": "sudo apk add",
}
_READERS = 4
_PIECE = 4 << 20
_BEAT_S = 0.5
# A file that changed more recently may change again within one tick of its clock.
_SETTLED_NS = 1_500_000_000
_BUSY = "another sync is writing here; of hosts that share a file system, name only one"
CLAIMED: dict[str, int] = {}  # hidden directories that are locked until the program ends

Digest = tuple[os.stat_result, str]
Beat = Callable[[int], None]


class HashCache:
    """A cache of SHA-256 hashes; a hash holds while its file's size, times and inode stay the same.

    It is kept in the file ``path``; ``None``: for this process alone.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is None:
            return
        with (
            contextlib.suppress(OSError, ValueError, TypeError),
            open(path, encoding="utf-8") as stream,
        ):
            self._known = dict(json.load(stream))

    def digest(self, path: str, told: Beat) -> Digest:
        """Return status and hash of a regular file; read it unless its hash is known. Raises
        OSError.
        """
        descriptor = os.open(
            path, os.O_RDONLY | os.O_NONBLOCK
        )  # a pipe of that name must not hold us up
        with open(descriptor, "rb", buffering=0) as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
            known = self._known.get(path)
            if isinstance(known, list) and known:
                *identity, digest = cast("list[Any]", known)
                if identity == file_identity(status) and len(str(digest)) == 64:
                    told(status.st_size)
                    return status, str(digest)
            began, digest, piece = time.time_ns(), hashlib.sha256(), memoryview(bytearray(_PIECE))
            while count := stream.readinto(piece):
                digest.update(piece[:count])
                told(count)
            if file_identity(os.fstat(descriptor)) != file_identity(status):
                raise OSError(errno.EBUSY, "it changes while it is read", path)
        if max(status.st_ctime_ns, status.st_mtime_ns) < began - _SETTLED_NS:
            self.remember(path, status, digest.hexdigest())
        return status, digest.hexdigest()

    def remember(self, path: str, status: os.stat_result, digest: str) -> None:
        """Note the hash of a file as it is now."""
        self._known[path] = [*file_identity(status), digest]

    def save(self) -> None:
        """Write the hashes of files that still exist; an error of the disk is ignored."""
        if self._path is None:
            return
        draft = f"{self._path}.{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            with os.fdopen(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
            ) as stream:
                json.dump(
                    {path: value for path, value in self._known.items() if os.path.lexists(path)},
                    stream,
                )
            os.replace(draft, self._path)


def file_identity(status: os.stat_result) -> list[int]:
    """Return five numbers; at least one changes when the file is written or replaced."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def all_digests(paths: Sequence[str], cache: HashCache, beat: Beat) -> list[Any]:
    """Return status and hash of each file, or its OSError; ``beat`` gets the bytes read, twice a
    second.
    """
    read = [0] * len(paths)

    def digest(number: int) -> Any:
        def told(count: int) -> None:
            read[number] += count

        try:
            return cache.digest(paths[number], told)
        except OSError as error:
            return error

    reading = in_background(lambda: side_by_side(digest, range(len(paths)), _READERS))
    while not reading.done():
        beat(sum(read))
        wait([reading], _BEAT_S)
    beat(sum(read))
    cache.save()
    return reading.result()


def program_path(name: str) -> str | None:
    """Return the path of a program, also from directories that are not on ssh's PATH."""
    return shutil.which(name, path=program_environment()["PATH"])


def install_command(package: str) -> str:
    """Return the command that installs a package on this computer; empty if none is known."""
    return next(
        (f"{words} {package}" for name, words in _INSTALL.items() if program_path(name)), ""
    )


def root_directory(root: Mapping[str, Any]) -> str:
    """Return the directory of a root on this computer, existing or not."""
    home = os.path.expanduser("~")
    base = {"home": home, "hub": hub_place(), "cache": cache_place(), "absolute": "/"}.get(
        root["base"]
    )
    if base is None:
        base = os.path.join(home, os.path.expanduser(root["cwd"]))
        above = _nearest(base)
        if not root["required"] and not (
            os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK)
        ):
            base = home  # ranks without such a directory work there
    return os.path.normpath(os.path.join(base, root["at"]))


def _nearest(path: str) -> str:
    """Return the path, or the nearest directory above it that exists."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


# --- the computer that receives -------------------------------------------------------------------


class WantedFile:
    """A file to receive: ``final`` is its place, ``staged`` its place until it is verified."""

    def __init__(
        self, root: str, path: str, size: int, sha256: str, mode: int, mtime_ns: int
    ) -> None:
        self.root, self.path, self.size = root, path, size
        self.sha256, self.mode, self.mtime_ns = sha256, mode, mtime_ns
        self.final = os.path.join(root, *path.split("/"))
        self.staged = os.path.join(root, STAGING, staged_name(path))

    def waiting(self) -> int:
        """Return its received bytes."""
        return max(0, min(self.size, _received(self.staged)))


def staged_name(path: str) -> str:
    """Return the name of a staged file, by its path below the root."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:24]


def _received(path: str) -> int:
    """Return the bytes that rsync has written to a file; -1: there is no such file, or it is a hard
    link made by :func:`_seed`.
    """
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else -1
    return -1


def look(request: Mapping[str, Any], beat: Beat) -> dict[str, Any]:
    """Return which files are lacking here; unless ``dry``, first move received ones into place, and
    prepare for the others.

    A file of the request is a list: number of its root, path below it, size, SHA-256, mode, time.

    Raises:
        OSError: something is in the way, does not fit, or cannot be written.
    """
    os.environ.update(request["envs"])
    roots = [root_directory(root) for root in request["roots"]]
    wanted = cast("list[list[Any]]", request["files"])
    files = [WantedFile(os.path.realpath(roots[int(root)]), *rest) for root, *rest in wanted]
    cache = HashCache(os.path.join(cache_place(), "sync-hashes.json"))
    have: dict[str, str] = {}
    lacking: list[WantedFile] = []
    for file, found in zip(files, all_digests([file.final for file in files], cache, beat)):  # noqa: B905 - Python 3.9
        _refuse_obstacle(file.final, found)
        have[_hash_of(found)] = file.final
        if _hash_of(found) != file.sha256:
            lacking.append(file)
    if not request["dry"]:
        lacking = _prepare(files, lacking, have, cache, request["token"], beat)
    wanting = set(lacking)
    server = [*os.environ.get("SSH_CONNECTION", "").split(), "", "", "", ""][2:4]
    return {
        "roots": roots,
        "lacking": [number for number, file in enumerate(files) if file in wanting],
        "partial": sum(file.waiting() for file in lacking),
        "rsync": program_path("rsync"),
        "install": install_command("rsync"),
        "user": user_name(),
        "address": server[0],
        "port": int(server[1] or 22),
    }


def _prepare(
    files: Sequence[WantedFile],
    lacking: Sequence[WantedFile],
    have: Mapping[str, str],
    cache: HashCache,
    token: str,
    beat: Beat,
) -> list[WantedFile]:
    """Claim the roots of lacking files, move received ones into place, and return the others."""
    _check_space(lacking)
    for root in {file.root for file in lacking} - set(CLAIMED):
        _claim(root, token)
    left = _take(lacking, cache, beat)
    for file in left:
        _seed(file, have.get(file.sha256, file.final))
    wanting = set(left)
    _tidy([file for file in files if file not in wanting], left, token)
    return left


def _hash_of(found: Digest | OSError) -> str:
    return "" if isinstance(found, OSError) else found[1]


def _refuse_obstacle(path: str, found: Digest | OSError) -> None:
    """Raise OSError if no file can be put at ``path``: it is a directory, or cannot be read."""
    if isinstance(found, OSError):
        if os.path.isdir(path) and not os.path.islink(path):
            raise IsADirectoryError(
                errno.EISDIR, "it is a directory, but a file must be copied there", path
            )
        if found.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBUSY):
            raise found


def _take(lacking: Sequence[WantedFile], cache: HashCache, beat: Beat) -> list[WantedFile]:
    """Move complete files to their places, each atomically; return the others."""
    whole = [file for file in lacking if file.size == _received(file.staged)]
    digests = all_digests([file.staged for file in whole], cache, beat)
    # A place that two roots lead to is filled once.
    taken = {
        file.final: file
        for number, file in enumerate(whole)
        if _hash_of(digests[number]) == file.sha256
    }
    for file in taken.values():
        _make_directories(file.root, file.path.split("/")[:-1])
        try:
            os.chmod(file.staged, file.mode)
            os.utime(file.staged, ns=(time.time_ns(), file.mtime_ns))
            _flush(file.staged)
            os.rename(file.staged, file.final)
        except OSError as error:  # its path is that of the hidden file
            raise OSError(error.errno, error.strerror, file.final) from None
        cache.remember(file.final, os.stat(file.final), file.sha256)
        beat(0)
    for directory in {os.path.dirname(path) for path in taken}:
        _flush(directory)
    cache.save()
    return [file for file in lacking if file.final not in taken]


def _make_directories(root: str, parts: Sequence[str]) -> None:
    """Make directories below ``root``; no link below it is followed. Raises OSError."""
    for part in parts:
        root = os.path.join(root, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(root)
        if os.path.islink(root) or not os.path.isdir(root):
            raise NotADirectoryError(
                errno.ENOTDIR, "this is a link or a file, where a directory must be", root
            )


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(lacking: Sequence[WantedFile]) -> None:
    """Raise OSError if the files do not fit; remove a partial file if there is no room for rsync's
    copy of it.
    """
    free: dict[int, int] = {}
    for root in {file.root for file in lacking}:
        these = [file for file in lacking if file.root == root]
        needed = sum(file.size - file.waiting() for file in these)
        device = os.stat(_nearest(root)).st_dev
        left = free[device] = free.get(device, shutil.disk_usage(_nearest(root)).free) - needed
        if left < 0:
            raise OSError(
                errno.ENOSPC,
                f"the disk has {(left + needed) / 1e9:.2f} GB left, and {needed / 1e9:.2f} GB are needed",
                root,
            )
        for file in these:
            if left < file.waiting() < file.size:
                os.unlink(file.staged)


def _seed(file: WantedFile, source: str) -> None:
    """Let rsync start from a hard link to a file that is here; it replaces the link alone."""
    if not os.path.lexists(file.staged):
        with contextlib.suppress(OSError):
            os.link(os.path.realpath(source), file.staged)


def _claim(root: str, token: str) -> None:
    """Make and lock the hidden directory; the file ``token`` there identifies this sync."""
    staging = os.path.join(root, STAGING)
    os.makedirs(root, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(staging, 0o700)
    descriptor = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", staging)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, _BUSY, root) from None
    except OSError:
        pass  # some network file systems cannot lock: go on
    CLAIMED[root] = descriptor
    for name in os.listdir(staging):
        if len(name) != len(staged_name("")):
            _keep_killed(os.path.join(staging, name))
    open(os.path.join(staging, token), "w").close()


def _keep_killed(draft: str) -> None:
    """Keep the larger of a killed rsync's draft and the staged file, for the next rsync."""
    waiting = os.path.join(os.path.dirname(draft), _name_of(draft))
    if len(_name_of(draft)) == len(staged_name("")) and _received(draft) > _received(waiting):
        os.replace(draft, waiting)
    else:
        os.unlink(draft)


def _name_of(path: str) -> str:
    """Return the name of a staged file from that of rsync's draft, ``.NAME.XXXXXX``."""
    return os.path.basename(path).lstrip(".").partition(".")[0]


def _tidy(there: Sequence[WantedFile], lacking: Sequence[WantedFile], token: str) -> None:
    """Remove staged copies of files that are in place, and hidden directories that nothing needs."""
    for file in there:
        with contextlib.suppress(OSError):
            os.unlink(file.staged)
    for root in {file.root for file in there} - {file.root for file in lacking}:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(root, STAGING, token))
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(root, STAGING))


def staged_bytes(roots: Sequence[str]) -> int:
    """Return the received bytes of files that are not in place yet."""
    sizes: dict[str, int] = {}
    for root in roots:
        with contextlib.suppress(OSError):
            for entry in os.scandir(os.path.join(root, STAGING)):
                name = root + _name_of(entry.path)
                sizes[name] = max(sizes.get(name, 0), _received(entry.path))
    return sum(sizes.values())


# --- the computer that sends ----------------------------------------------------------------------


def send(request: Mapping[str, Any], beat: Beat) -> dict[str, Any]:
    """Run rsync for each of ``transfers``, up to the first that fails.

    A transfer has ``links``, paths of files by their staged names, and ``ssh``, the words of the
    ssh command. Returns the exit code of the last one, and the statistics and error output of all.
    """
    ended: dict[str, Any] = {"code": 0, "stats": "", "said": ""}
    for transfer in request["transfers"]:
        if ended["code"] == 0:
            _send(request["rsync"], transfer, beat, ended)
    return ended


def _send(rsync: str, transfer: Mapping[str, Any], beat: Beat, ended: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="allhands-sync-") as work:
        os.mkdir(os.path.join(work, "files"))
        for name, path in transfer["links"].items():
            os.symlink(path, os.path.join(work, "files", name))
        with open(
            os.path.join(work, "ssh"), "w", encoding="utf-8", errors="surrogateescape"
        ) as stream:
            # rsync calls this script with a host, the name of the program there, and the words for
            # that program.
            stream.write(f'shift 2\n{shlex.join(transfer["ssh"])}" $*" | {{ {SKIP}; }}\n')
        with (
            open(os.path.join(work, "stats"), "w+b") as stats,
            open(os.path.join(work, "said"), "w+b") as said,
        ):
            process = subprocess.Popen(
                [rsync, *RSYNC_OPTIONS, "-e", "sh ./ssh", "files/", "peer:."],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=stats,
                stderr=said,
                env={
                    name: value
                    for name, value in program_environment().items()
                    if not name.startswith("RSYNC_")
                },
            )  # in this process's group, so that killing the group ends both
            try:
                while process.poll() is None:
                    beat(0)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_BEAT_S)
            finally:
                process.kill()
                ended["code"] = process.wait()
            for name, stream in (("stats", stats), ("said", said)):
                stream.seek(0)
                ended[name] += stream.read(1 << 14).decode(errors="replace")
