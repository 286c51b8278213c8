"""Files of lines that several processes may append to, and that a kill may tear."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from allhands.io.files import make_directory, private_opener

_log = logging.getLogger(__name__)


class LineFile:
    """Appends lines to ``path``, each with one write, so that readers and kills see whole ones.

    Directories above it are made; nobody else may read what is made.

    Args:
        what: the lines hold, for the one warning when one cannot be written; it is lost, and the
            run goes on.

    Raises:
        StorageError: a directory cannot be made.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what, self._warned = path, what, False
        make_directory(path.parent, private=True)
        self._fd = private_opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        size = os.fstat(self._fd).st_size
        # A kill may have cut the last line off: the next one must not be glued to it.
        self._torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def append(self, line: str) -> None:
        """Write a line, or raise ``OSError``."""
        data = f"{chr(10) if self._torn else ''}{line}\n".encode()
        self._torn = True
        if os.write(self._fd, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def try_append(self, line: str) -> None:
        """Write a line; if that fails it is warned about once."""
        try:
            self.append(line)
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or error
                _log.warning(
                    "%s: no %s can be written (%s); the run goes on", self._path, self._what, why
                )

    def make_private(self) -> None:
        """Let nobody else read it, where the system allows that: it may be another person's file."""
        with suppress(OSError):
            os.fchmod(self._fd, 0o600)

    def close(self) -> None:
        """Close the file; may be called again. What is written later is lost."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
