"""Reading of YAML configuration files; ``1e-5`` is a number, and a key may be given only once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from allhands.errors import ConfigError
from allhands.io.paths import meant

if TYPE_CHECKING:
    import yaml


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; ``1e-5`` is read as a number.

    Raises:
        ConfigError: missing or unreadable file, bad YAML (with line), not a mapping, or a key given
            twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        hint = "save it as UTF-8: editors offer this when they save a file"
        if isinstance(error, OSError):
            reason, hint = (
                str(error.strerror),
                meant(path, "check the path after --config", read_yaml),
            )
        raise ConfigError(
            f"the configuration file cannot be read: {reason}",
            code="config-file-unreadable",
            where=str(path),
            hint=hint,
        ) from None
    try:
        content = yaml.load(text, _yaml_loader())
        _refuse_twice(cast("Any", yaml.compose(text, _yaml_loader())), path)
    except (ValueError, RecursionError) as error:  # a date such as 2026-13-45
        raise ConfigError(
            f"a value cannot be read: {error}",
            code="config-file-invalid",
            where=str(path),
            hint="quote a text that only looks like a date or a number",
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or "cannot be parsed"
        hint = "write one 'key: value' in each line, without blanks before the key"
        raise ConfigError(
            f"not valid YAML: {problem}", code="config-file-invalid", where=where, hint=hint
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            "the file must hold 'key: value' pairs",
            code="config-file-invalid",
            where=str(path),
            hint="see docs/configuration.md",
        )
    return cast("dict[str, Any]", content)


def _refuse_twice(node: yaml.Node | None, path: str | Path) -> None:
    """Refuse a key that is given twice; PyYAML silently takes the last value."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for member in node.value:
            _refuse_twice(member, path)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value in lines:
            problem = f"{key.value} is given twice, in line {lines[key.value]} too"
            raise ConfigError(
                problem, code="option-given-twice", where=f"{path}:{line}", hint="keep one of them"
            )
        lines[str(key.value)] = line
        _refuse_twice(value, path)


def _yaml_loader() -> type[yaml.SafeLoader]:
    """Return a YAML loader that reads 1e-5 as a number; YAML 1.1 reads it as a string."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        pass

    number = re.compile(r"^[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
    StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    return StrictLoader


def keys_of(path: str | Path) -> list[tuple[str, int]]:
    """Return the top-level keys of a YAML file, as they are spelled, with their line numbers.

    ``path``: a file that :func:`read_yaml` can read.
    """
    import yaml

    text = Path(path).read_text(encoding="utf-8")
    root = cast("Any", yaml.compose(text, _yaml_loader()))
    names = [name for name, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    return [(name.value, name.start_mark.line + 1) for name in names]
