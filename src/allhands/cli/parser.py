"""The command-line parser of all verbs.

It refuses options that are given twice, and puts the home directory in place of ``~`` in paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import typer
from typer.core import TyperCommand, TyperGroup

from allhands.errors import ConfigError
from allhands.io.paths import local_path, require_words

# Options and arguments of type str that are paths, or names that may be paths, such as models and
# data sets.
TEXT_PATHS = frozenset(
    {
        "model",
        "data",
        "tokenizer",
        "adapter_path",
        "resume",
        "resume_adapter_file",
        "config",
        "hostfile",
        "source",
        "sources",
        "base",
        "origin",
        "chat_template",
    }
)


class Command(TyperCommand):
    """A verb."""

    text_paths: ClassVar[frozenset[str]] = TEXT_PATHS

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments first, then options under their headings, and options without a heading
        last.
        """
        if not any(getattr(option, "rich_help_panel", None) for option in self.params):
            super().format_options(ctx, formatter)
            return
        from allhands.cli.option_groups import GROUPS, OTHERS

        sections: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*GROUPS, OTHERS)}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record is not None:
                sections[getattr(option, "rich_help_panel", None) or OTHERS].append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, refuse options that are given twice, and put the home directory in place of ``~``.

        Raises:
            ConfigError: the words are not understood, an option with one value is given twice, or a
                ``~user`` does not exist.
        """
        words = list(args)
        with _in_our_words(words, ctx):
            typed, left, order = self.make_parser(ctx).parse_args(args=list(words))
            if not any(option.is_eager for option in order):  # --help does nothing else
                self._refuse_twice(ctx, words, order)
                if left and not ctx.allow_extra_args:
                    from allhands.cli.usage import unexpected_words

                    raise unexpected_words(left, ctx)
            rest: list[str] = super().parse_args(ctx, args)
        for option in self.params:
            if typed.get(option.name) is not None and option.name in ctx.params:
                ctx.params[option.name] = self._at_home(
                    option, typed[option.name], ctx.params[option.name]
                )
        return rest

    def _refuse_twice(self, ctx: Any, words: list[str], order: list[Any]) -> None:
        """Refuse an option that is given twice: the parser would silently take the last value."""
        for option, count in Counter(order).items():
            if (
                option.param_type_name == "option"
                and count > 1
                and not option.multiple
                and not option.count
            ):
                raise twice(_spelled(option, words, ctx.token_normalize_func), _flag_of(option))

    def _at_home(self, option: Any, typed: Any, value: Any) -> Any:
        """Return ``value`` with the home directory in place of ``~``.

        Args:
            typed: the text of the value, because a ``Path`` does not distinguish ``~`` and ``./~``.

        Raises:
            ConfigError: the text is not UTF-8, or it is no valid path.
        """
        if isinstance(value, list | tuple):
            values = cast("Sequence[Any]", value)
            return [self._at_home(option, *pair) for pair in zip(typed, values, strict=True)]
        if isinstance(value, Path):
            return Path(local_path(typed, _flag_of(option)))
        if type(value) is str:
            _require_words(value, _flag_of(option))
        is_text = type(value) is str and option.name in self.text_paths  # a choice is a text, too
        return local_path(typed, _flag_of(option)) if is_text else value


class HostsCommand(Command):
    """A verb about other computers, on which ``~`` is another directory; it stays in paths."""

    text_paths: ClassVar[frozenset[str]] = frozenset({"hostfile"})


class UnknownCommand(ConfigError):
    """The error of a word that is no command.

    Attributes:
        group: the words before the unknown one; empty for a verb without a group.
        siblings: the commands of this group.
    """

    def __init__(self, word: str, group: str, siblings: Sequence[str]) -> None:
        super().__init__(
            "not a command of allhands", code="command-unknown", where=f"{group} {word}".strip()
        )
        self.group = group
        self.siblings = siblings


class VerbGroup(TyperGroup):
    """A group of verbs; an unknown verb raises :class:`UnknownCommand`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words before the verb.

        Raises:
            ConfigError: there is an unknown option among these words.
        """
        with _in_our_words(list(args), ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the verb with which ``args`` begin, the verb, and the other words.

        Raises:
            UnknownCommand: there is no such verb.
        """
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UnknownCommand(args[0], ctx.command_path.partition(" ")[2], list(self.commands))
        return super().resolve_command(ctx, args)


class App(typer.Typer):
    """The application: its verbs are of class :class:`Command`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=VerbGroup, **settings)

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = Command, **settings: Any
    ) -> Callable[[Any], Any]:
        """Register a verb, as in typer."""
        return super().command(name, cls=cls, **settings)


@contextmanager
def _in_our_words(words: Sequence[str], context: Any) -> Generator[None]:
    """Raise the parser's errors about ``words`` as :class:`ConfigError`."""
    try:
        yield
    except Exception as error:
        if not any(hasattr(error, name) for name in ("param_hint", "option_name")):
            raise  # the end after --help, or our own error
        from allhands.cli.usage import usage_error

        raise usage_error(error, words, context) from None


def _require_words(value: str, where: str) -> None:
    try:
        require_words(value)
    except ValueError as error:
        raise ConfigError(
            str(error),
            code="text-not-unicode",
            where=where,
            hint="make the terminal or the script send UTF-8",
        ) from None


def refuse_idle(given: Mapping[str, object], why: str, hint: str) -> None:
    """Refuse options that have a value but no effect.

    Args:
        given: values by flag; ``None``: not given.
        why: reason why they have no effect.

    Raises:
        ConfigError: an option has a value.
    """
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(
                f"it has no effect {why}", code="option-without-effect", where=flag, hint=hint
            )


def twice(spelled: Sequence[str], where: str) -> ConfigError:
    """Return the error for an option that is given more than once.

    ``spelled``: the option as it was written each time.
    """
    return ConfigError(
        f"given more than once: {' and '.join(spelled)}",
        code="option-given-twice",
        where=where,
        hint="keep one of them",
    )


def _flag_of(option: Any) -> str:
    """Return the longest name of an option, which messages use."""
    return max(option.opts, key=len)


def _spelled(option: Any, words: Sequence[str], normal: Callable[[str], str] | None) -> list[str]:
    """Return each occurrence of the option among ``words``, with its value.

    ``normal``: returns the usual form of a flag.
    """
    names = {*option.opts, *option.secondary_opts}
    found: list[str] = []
    ends = words.index("--") if "--" in words else len(words)
    for place, word in enumerate(words[:ends]):
        name, equals, _ = word.partition("=")
        if name.startswith("--") and normal is not None:
            name = f"--{normal(name[2:])}"
        if name in names:
            value = "" if equals or option.is_flag else f" {' '.join(words[place + 1 : place + 2])}"
            found.append(word + value)
        elif word[:2] in names and not word.startswith("--"):  # -n2
            found.append(word)
    return found if len(found) > 1 else [_flag_of(option)] * 2


def with_auto_resume(arguments: list[str]) -> list[str]:
    """Give ``--resume`` without a value the value ``auto``, because the parser needs a value."""
    result: list[str] = []
    for place, word in enumerate(arguments):
        result.append(word)
        following = arguments[place + 1 : place + 2]
        if word in ("--resume", "--resume-from-checkpoint") and (
            not following or following[0].startswith("-")
        ):
            result.append("auto")
    return result
