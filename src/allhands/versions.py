"""The versions of allhands and of what it stands on, also where allhands runs from a source tree."""

from __future__ import annotations

__version__ = "0.1.0"


def version_of(name: str) -> str | None:
    """The version of a package that is installed here; ``None`` if it is not.

    Of allhands itself its own: it may run without being installed, or beside another one that is.
    """
    if name == "allhands":
        return __version__
    import importlib.metadata  # slow to import, and this module is part of `import allhands`

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions_of(*names: str) -> dict[str, str]:
    """By name, of those that are installed."""
    return {name: found for name in names if (found := version_of(name)) is not None}
