"""The dashboard's web application. It answers this computer alone, or callers with the token.

Texts of a run become HTML only through templates that escape them; the policy of the pages lets no
script but ours run. Only the stop button changes anything: it needs a header that no other web page
can send.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import escape
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from allhands.errors import AllhandsError, DataError
from allhands.report.dashboard.runs import (
    ask_to_stop,
    find_runs,
    logs_of,
    processes_of,
    summary_of,
    tail_of,
)
from allhands.report.facts import read_facts
from allhands.report.html import asset, colour_sheet, page_parts
from allhands.report.page import make_page
from allhands.runtime.http_guard import Guard

_COOKIE = "allhands-token"
_HEADER = "x-allhands"
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_ASSETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "style.css": ("text/css", ("uplot/uPlot.min.css", "report.css", "dashboard.css")),
    "script.js": ("text/javascript", ("uplot/uPlot.iife.min.js", "charts.js", "dashboard.js")),
}


@dataclass(frozen=True)
class Settings:
    """Directory and visitors of a dashboard.

    Attributes:
        root: where runs are looked for.
        guard: the names under which requests may ask for it, and the token.
    """

    root: Path
    guard: Guard = Guard()  # noqa: RUF009 - it is frozen


def make_app(settings: Settings) -> Starlette:
    """Return the application."""
    routes = [
        Route("/", partial(_index, settings)),
        Route("/assets/{name}", _asset),
        Route("/api/runs", partial(_runs, settings)),
        Route("/api/page", partial(_page, settings)),
        Route("/api/log", partial(_log, settings)),
        Route("/api/stop", partial(_stop, settings), methods=["POST"]),
    ]
    guard = [Middleware(_Guard, settings.guard)]
    return Starlette(routes=routes, middleware=guard, exception_handlers={AllhandsError: _told})


class _Guard:
    """Middleware that checks every request first, and adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def answered(message: Any) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            await (self._refusal(Request(scope)) or self._app)(scope, receive, answered)
        except Exception as error:
            print(
                f"allhands: error: a request failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            if not begun:
                await _failure("the dashboard could not answer this request", 500)(
                    scope, receive, answered
                )

    def _refusal(self, request: Request) -> Response | None:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw
        ]
        if refusal := self._guard.refusal(request.method, headers):
            return PlainTextResponse(f"{refusal.message}\n", refusal.status)
        given = request.query_params.get("token", "")
        if self._guard.knows_token(headers) or self._guard.is_token(
            request.cookies.get(_COOKIE, "")
        ):
            return None
        if self._guard.is_token(given):
            # Take the token out of the address, from which it gets into histories and logs.
            answer = RedirectResponse("/", 303)
            answer.set_cookie(_COOKIE, given, httponly=True, samesite="strict")
            return answer
        return PlainTextResponse(
            "the token is missing or wrong: open the address that was printed\n", 403
        )


def _failure(told: object, status: int) -> Response:
    code = {"code": told.code} if isinstance(told, AllhandsError) else {}
    return JSONResponse({"error": str(told), **code}, status)


async def _told(_request: Request, error: Exception) -> Response:
    return _failure(error, 404)


async def _index(settings: Settings, _request: Request) -> Response:
    return HTMLResponse(
        asset("dashboard.html").replace("ROOT", str(escape(settings.root.resolve().name)))
    )


async def _asset(request: Request) -> Response:
    kind, names = _ASSETS.get(request.path_params["name"], ("", ()))
    if not names:
        return PlainTextResponse("there is no such file\n", 404)
    return Response(
        "\n".join([*map(asset, names), *[colour_sheet()] * (kind == "text/css")]), media_type=kind
    )


async def _runs(settings: Settings, _request: Request) -> Response:
    def look() -> list[Any]:
        found = (
            summary_of(name, directory) for name, directory in find_runs(settings.root).items()
        )
        return [one for one in found if one is not None]

    return _json(await run_in_threadpool(look))


async def _page(settings: Settings, request: Request) -> Response:
    names = request.query_params.getlist("run")

    def look() -> dict[str, Any]:
        known = find_runs(settings.root)
        facts = {name: read_facts(known[name]) for name in dict.fromkeys(names) if name in known}
        if not facts:
            return {"runs": [], "charts": {}, "html": "", "sections": []}
        page, now = make_page(list(facts.values())), time.time()
        html, charts = page_parts(page)
        runs = [
            {"name": name, "processes": processes_of(one, now), "logs": logs_of(known[name])}
            for name, one in facts.items()
        ]
        sections = [
            ("words", "Words"),
            *((section.key, section.short) for section in page.sections),
        ]
        told = [{"key": key, "short": short} for key, short in sections]
        return {"runs": runs, "charts": charts, "html": html, "sections": told}

    return _json(await run_in_threadpool(look))


def _named(settings: Settings, request: Request) -> Path:
    """The directory of the run that a request names."""
    directory = find_runs(settings.root).get(request.query_params.get("run", ""))
    if directory is None:
        raise DataError("there is no such run", code="run-missing")
    return directory


async def _log(settings: Settings, request: Request) -> Response:
    directory = _named(settings, request)
    return _json(
        {"text": await run_in_threadpool(tail_of, directory, request.query_params.get("log", ""))}
    )


async def _stop(settings: Settings, request: Request) -> Response:
    if request.headers.get(_HEADER) != "stop":
        return _failure("only the dashboard's own page may ask for this", 403)
    return _json({"told": await run_in_threadpool(ask_to_stop, _named(settings, request))})


def _json(value: Any) -> Response:
    """Return JSON in which numbers that are not finite are ``null``."""
    return Response(TypeAdapter(Any).dump_json(value), media_type="application/json")
