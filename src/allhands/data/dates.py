"""The date that a chat template writes: a run fixes one moment and keeps it.

The templates of Llama 3.2, SmolLM3, Granite, gpt-oss and others ask for the current date with
``strftime_now``. That is right when a model answers; in training the same record must become the
same tokens whenever, and wherever, it is rendered. So a macro of the same name is put before the
template. It gives the date of one moment, as plain text, because transformers lets nothing but
plain values into a template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

# Key under which a run keeps the moment in its checkpoints and beside its adapter.
DATE_KEY = "template_date"
_ASKS = "strftime_now"
_LITERAL = re.compile(r"""strftime_now\(\s*["']([^"'\\]*)["']\s*\)""")
_WHETHER = re.compile(r"strftime_now\s+is\s+(?:not\s+)?defined")
_UNKNOWN = "\ue0a3"
# The macro adds no text: Jinja, as transformers sets it, drops the newline after a block.
_MACRO = (
    "{% macro strftime_now(format) %}"
    "{{ allhands_dates[format] if format in allhands_dates else raise_exception('"
    + _UNKNOWN
    + "' ~ format) }}"
    "{% endmacro %}\n"
)


def asks_date(tokenizer: Any) -> bool:
    """Return True if the tokenizer's chat template asks for the current date."""
    return any(_ASKS in source for source in _sources(tokenizer))


def date_facts(tokenizer: Any, moment: datetime) -> list[str] | str:
    """Return ``moment`` in each of the chat template's formats; or the ISO moment if some formats
    are computed.

    Two moments with the same facts give the same tokens.
    """
    sources = _sources(tokenizer)
    formats = [found for source in sources for found in _LITERAL.findall(source)]
    asked = sum(source.count(_ASKS) - len(_WHETHER.findall(source)) for source in sources)
    return (
        [moment.strftime(one) for one in formats] if len(formats) == asked else moment.isoformat()
    )


def _sources(tokenizer: Any) -> list[str]:
    """Return the tokenizer's Jinja templates; none where mlx_lm has a program in their place."""
    if callable(getattr(tokenizer, "_chat_template", None)):
        return []
    given = getattr(tokenizer, "chat_template", None)
    found: Iterable[Any] = given.values() if isinstance(given, dict) else [given]
    return [source for source in found if isinstance(source, str)]


class StoppedClock:
    """Renders conversations as if it were always the same moment.

    A rendering that asks for an unknown format fails; the format is then added, and the rendering
    is repeated. So formats that a template computes work too.
    """

    def __init__(self, moment: datetime) -> None:
        """``moment``: local time, without a time zone."""
        self._moment = moment
        self._dates: dict[str, str] = {}

    def rendered(self, source: str, render: Callable[..., str]) -> str:
        """Render the template ``source`` with the date macro in front; pass on ``render``'s errors.

        Args:
            render: called with the keywords ``chat_template`` (the template) and
                ``allhands_dates`` (the dates by format, for the macro).
        """
        while True:
            try:
                return render(chat_template=_MACRO + source, allhands_dates=dict(self._dates))
            except Exception as error:
                before, mark, wanted = str(error).partition(_UNKNOWN)
                if not mark or before or wanted in self._dates:
                    raise
                self._dates[wanted] = self._moment.strftime(wanted)

    def dates_in(self, text: str) -> tuple[str, ...]:
        """Return the dates that a rendered conversation holds, in order of their first use by the
        template.
        """
        return tuple(date for date in self._dates.values() if date and date in text)
