"""The dashboard's web application. It answers this computer alone, or who knows the token.

Nothing of a run becomes HTML here but by templates that escape; the policy of the pages lets no script but ours run.
What changes anything, the stop button, needs a header that no other web page can send.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from allhands.errors import AllhandsError
from allhands.report.dashboard.runs import (
    Judged,
    ask_to_stop,
    facts_of,
    find_runs,
    logs_of,
    processes_of,
    summary_of,
    tail_of,
)
from allhands.report.html import asset, colour_sheet, page_parts
from allhands.report.page import make_page
from allhands.runtime.http_guard import Guard

_COOKIE = "allhands-token"
_HEADER = "x-allhands"
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_ASSETS = {
    "style.css": ("text/css", ("uplot/uPlot.min.css", "report.css", "dashboard.css")),
    "script.js": ("text/javascript", ("uplot/uPlot.iife.min.js", "charts.js", "dashboard.js")),
}


@dataclass(frozen=True)
class Settings:
    """What the dashboard shows, and to whom.

    Attributes:
        root: where runs are looked for.
        guard: under which names it may be asked for, and with which token.
    """

    root: Path
    guard: Guard = Guard()  # noqa: RUF009 - it is frozen


def make_app(settings: Settings) -> Starlette:
    """The application."""
    routes = [
        Route("/", partial(_index, settings)),
        Route("/assets/{name}", _asset),
        Route("/api/runs", partial(_runs, settings, Judged())),
        Route("/api/page", partial(_page, settings)),
        Route("/api/log", partial(_log, settings)),
        Route("/api/stop", partial(_stop, settings), methods=["POST"]),
    ]
    guard = [Middleware(_Guard, settings.guard)]
    return Starlette(routes=routes, middleware=guard, exception_handlers={AllhandsError: _told})


class _Guard:
    """Looks at every request before anything else does, and adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def answered(message: Any) -> None:
            nonlocal begun
            begun = True
            await _with_headers(send, message)

        try:
            await (self._refusal(Request(scope)) or self._app)(scope, receive, answered)
        except Exception as error:
            print(f"allhands: error: a request failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not begun:
                failed = JSONResponse({"error": "the dashboard could not answer this request"}, status_code=500)
                await failed(scope, receive, answered)

    def _refusal(self, request: Request) -> Response | None:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        refusal = self._guard.refusal(request.method, headers)
        if refusal is not None:
            return PlainTextResponse(f"{refusal.message}\n", status_code=refusal.status)
        if self._guard.knows_token(headers):
            return None
        given = request.query_params.get("token")
        if given is not None and self._guard.is_token(given):
            # Not to be left in the address, from which it gets into histories and logs.
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(_COOKIE, given, httponly=True, samesite="strict")
            return answer
        if self._guard.is_token(request.cookies.get(_COOKIE, "")):
            return None
        return PlainTextResponse("the token is missing or wrong: open the address that was printed\n", status_code=403)


async def _with_headers(send: Send, message: Any) -> None:
    if message["type"] == "http.response.start":
        added = {
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }
        message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in added.items())]
    await send(message)


async def _told(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=404)


Answer = Callable[[Request], Awaitable[Response]]


async def _index(settings: Settings, _request: Request) -> Response:
    return HTMLResponse(asset("dashboard.html").replace("ROOT", _escaped(settings.root.resolve().name)))


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


async def _asset(request: Request) -> Response:
    found = _ASSETS.get(request.path_params["name"])
    if found is None:
        return PlainTextResponse("there is no such file\n", status_code=404)
    kind, names = found
    more = [colour_sheet()] if kind == "text/css" else []
    return Response("\n".join([*map(asset, names), *more]), media_type=kind)


async def _runs(settings: Settings, judged: Judged, _request: Request) -> Response:
    def look() -> list[Any]:
        found = (summary_of(name, directory, judged) for name, directory in find_runs(settings.root).items())
        return [asdict(one) for one in found if one is not None]

    return _json(await run_in_threadpool(look))


async def _page(settings: Settings, request: Request) -> Response:
    names = request.query_params.getlist("run")

    def look() -> dict[str, Any]:
        known = find_runs(settings.root)
        chosen = {name: known[name] for name in names if name in known}
        if not chosen:
            return {"runs": [], "charts": {}, "html": "", "sections": []}
        facts = {name: facts_of(directory) for name, directory in chosen.items()}
        page = make_page(list(facts.values()), now=None)
        html, charts = page_parts(page)
        now = time.time()
        runs = [
            {"name": name, "processes": processes_of(one, now), "logs": logs_of(chosen[name])}
            for name, one in facts.items()
        ]
        sections = [{"key": "words", "short": "Words"}]
        sections += [{"key": section.key, "short": section.short} for section in page.sections]
        return {"runs": runs, "charts": charts, "html": html, "sections": sections}

    return _json(await run_in_threadpool(look))


async def _log(settings: Settings, request: Request) -> Response:
    name, log = request.query_params.get("run", ""), request.query_params.get("log", "")
    directory = find_runs(settings.root).get(name)
    if directory is None:
        return JSONResponse({"error": "there is no such run"}, status_code=404)
    return _json({"text": await run_in_threadpool(tail_of, directory, log)})


async def _stop(settings: Settings, request: Request) -> Response:
    if request.headers.get(_HEADER) != "stop":
        return JSONResponse({"error": "only the dashboard's own page may ask for this"}, status_code=403)
    directory = find_runs(settings.root).get(request.query_params.get("run", ""))
    if directory is None:
        return JSONResponse({"error": "there is no such run"}, status_code=404)
    return _json({"told": await run_in_threadpool(ask_to_stop, directory)})


def _json(value: Any) -> Response:
    """JSON, in which what is no finite number is ``null``."""
    return Response(json.dumps(_finite(value), allow_nan=False), media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
