"""Print the notes of a release: ``python scripts/release_notes.py v0.1.0 [DIST]``.

The notes are the section of CHANGELOG.md with the tag's version. It is an error if there is no
such section, if it has no date, or if a wheel or sdist in DIST has another version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"
_HEADING = re.compile(r"^## (\S+)(?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)


def notes_of(version: str, changelog: str) -> str:
    """Return the text below the heading of a version.

    Raises:
        ValueError: there is no such heading, or it has no date or no text.
    """
    headings = list(_HEADING.finditer(changelog))
    for number, found in enumerate(headings):
        if found[1] != version:
            continue
        if found[2] is None:
            raise ValueError(f"CHANGELOG.md has no date for {version}")
        end = headings[number + 1].start() if number + 1 < len(headings) else len(changelog)
        text = changelog[found.end() : end].strip()
        if not text:
            raise ValueError(f"CHANGELOG.md says nothing about {version}")
        return text
    raise ValueError(f"CHANGELOG.md has no section {version}")


def check_archives(version: str, directory: Path) -> None:
    """Look at the names of a wheel and an sdist.

    Raises:
        ValueError: one of them is missing or has another version.
    """
    wanted = {f"allhands-{version}-py3-none-any.whl", f"allhands-{version}.tar.gz"}
    found = {path.name for path in directory.iterdir()}
    if found != wanted:
        raise ValueError(f"{directory} has {sorted(found)}, and not {sorted(wanted)}")


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    version = arguments[0].removeprefix("v")
    try:
        if len(arguments) == 2:
            check_archives(version, Path(arguments[1]))
        print(notes_of(version, CHANGELOG.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
