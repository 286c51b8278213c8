"""``python -m allhands.cluster.setup.pack WHEEL``: pack this installation of allhands as a wheel,
byte for byte.

The archive holds the files of the package and the metadata of its installation; nothing is built or
fetched. Equal files give equal archives.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys
import zipfile
from pathlib import Path

from allhands.cluster.setup.source import package_root
from allhands.errors import AllhandsError, StorageError
from allhands.io.files import make_directory, write_whole
from allhands.runtime.versions import package_files

_TAGS = "Wheel-Version: 1.0\nGenerator: allhands\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_DAY = (1980, 1, 1, 0, 0, 0)  # the first that an archive can hold
_COPIED = ("METADATA", "entry_points.txt")


def pack(wheel: Path) -> None:
    """Write the wheel, replacing an older one.

    Raises:
        StorageError: it cannot be written.
    """
    found = importlib.metadata.distribution("allhands")
    root = package_root()
    files = {f"allhands/{name}": (root / name).read_bytes() for name in package_files(str(root))}
    info = f"allhands-{found.version}.dist-info"
    files |= {
        f"{info}/{name}": text.encode()
        for name in _COPIED
        if (text := found.read_text(name)) is not None
    }
    files[f"{info}/WHEEL"] = _TAGS.encode()
    record = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "".join(
        f"{line}\n" for line in (*record, f"{info}/RECORD,,")
    ).encode()
    make_directory(wheel.parent, private=True)

    def write(place: Path) -> None:
        with zipfile.ZipFile(place, "w") as archive:
            for name, content in files.items():
                entry = zipfile.ZipInfo(name, _DAY)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = 0o100644 << 16
                archive.writestr(entry, content)

    write_whole(wheel, write, private=True)


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise StorageError(
                "the wheel to write is missing", code="wheel-path-missing", hint="give its path"
            )
        pack(Path(sys.argv[1]))
    except AllhandsError as error:
        sys.exit(str(error))
