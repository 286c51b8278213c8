"""Who may ask: names of hosts, origins of pages, tokens; every answer, and its opposite."""

from __future__ import annotations

import random
import socket

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allhands.errors import ConfigError
from allhands.runtime.http_guard import Guard, listen, origin_of


def status(guard: Guard, method: str = "GET", **headers: str) -> int:
    """0 for a request that is let through; underscores stand for the hyphens of names."""
    given = [
        (name.replace("_", "-"), value)
        for name, value in ({"host": "localhost:8080"} | headers).items()
    ]
    refusal = guard.refusal(method, given)
    return refusal.status if refusal else 0


HERE = [
    "localhost",
    "localhost:8080",
    "LOCALHOST:1",
    "localhost.",
    "127.0.0.1",
    "127.9.8.7:80",
    "[::1]",
    "[::1]:8080",
]
ELSEWHERE = [
    *(
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost:80:80",
        "[::1",
        "a@localhost",
    ),
    *(
        "",
        " ",
        "0.0.0.0",
        "[::]",
        "10.0.0.5",
        "localhost/x",
        "http://localhost",
        "[::2]:8080",
        "evil.example:8080",
    ),
    *("127.0.0.1 evil.example", "localhost:99999999", "2130706433", "[::ffff:10.0.0.1]"),
]


@pytest.mark.parametrize("host", HERE)
def test_this_computers_names_are_answered(host: str) -> None:
    assert status(Guard(), host=host) == 0


@pytest.mark.parametrize("host", ELSEWHERE)
def test_a_name_that_somebody_made_point_here_is_refused(host: str) -> None:
    assert status(Guard(), host=host) == 400


def test_names_that_it_was_told_of() -> None:
    guard = Guard(frozenset({"studio.local", "10.0.0.5", "fd00::5"}))
    for host in ("studio.local:8080", "Studio.Local.", "10.0.0.5:1", "[fd00:0::5]:8080"):
        assert status(guard, host=host) == 0
    assert status(guard, host="10.0.0.6") == 400


def test_one_host_and_no_more() -> None:
    assert Guard().refusal("GET", []) is not None
    assert Guard().refusal("GET", [("Host", "localhost"), ("Host", "evil.example")]) is not None
    assert Guard().refusal("GET", [("hOsT", "localhost")]) is None


@pytest.mark.parametrize(
    ("origin", "host", "let"),
    [
        ("http://localhost:8080", "localhost:8080", True),
        ("HTTP://LocalHost:8080", "localhost:8080", True),
        ("http://localhost", "localhost", True),
        ("https://studio", "studio", True),
        ("http://localhost:3000", "localhost:8080", False),
        ("http://127.0.0.1:8080", "localhost:8080", False),
        ("http://evil.example", "localhost:8080", False),
        ("http://localhost:8080.evil.example", "localhost:8080", False),
        ("file://localhost:8080", "localhost:8080", False),
        ("null", "localhost:8080", False),
        ("", "localhost:8080", False),
    ],
)
def test_pages_of_the_server_itself_may_ask_and_others_not(
    origin: str, host: str, let: bool
) -> None:
    guard = Guard(frozenset({"studio"}))
    for method in ("GET", "POST", "OPTIONS"):
        assert (status(guard, method, host=host, origin=origin) == 0) == let
    assert "Access-Control-Allow-Origin" not in guard.shared_with([("Origin", origin)])


def test_pages_that_it_was_told_of() -> None:
    guard = Guard(origins=frozenset({"http://localhost:3000", "app://obsidian.md"}))
    asked = [
        ("Origin", "http://localhost:3000"),
        ("Access-Control-Request-Headers", "authorization, x-stainless-os"),
    ]
    shared = guard.shared_with(asked)
    assert shared["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert shared["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    assert shared["Vary"] == "Origin"
    assert status(guard, "POST", origin="http://localhost:3000") == 0
    assert status(guard, "POST", origin="app://obsidian.md") == 0
    for origin in (
        "http://localhost:3001",
        "https://localhost:3000",
        "null",
        "http://evil.example",
    ):
        assert status(guard, "POST", origin=origin) == 403
        assert guard.shared_with([("Origin", origin)]) == {"Vary": "Origin"}
    # Nobody writes headers of ours.
    assert "Access-Control-Allow-Headers" not in guard.shared_with(
        [asked[0], (asked[1][0], "a\r\n X: y")]
    )
    every = Guard(origins=frozenset({"*"}))
    assert status(every, "POST", origin="http://evil.example") == 0
    assert (
        every.shared_with([("Origin", "http://evil.example")])["Access-Control-Allow-Origin"] == "*"
    )
    assert status(every, "POST", host="evil.example") == 400


def test_what_pages_load_without_naming_an_origin() -> None:
    for site in ("cross-site", "same-site"):
        assert status(Guard(), sec_fetch_site=site, sec_fetch_mode="no-cors") == 403
        assert status(Guard(), "POST", sec_fetch_site=site, sec_fetch_mode="navigate") == 403
        # A link that a person follows.
        assert status(Guard(), sec_fetch_site=site, sec_fetch_mode="navigate") == 0
    for site in ("same-origin", "none"):
        assert status(Guard(), sec_fetch_site=site, sec_fetch_mode="no-cors") == 0


def test_the_token() -> None:
    guard = Guard(token="correct-horse")
    assert guard.knows_token([("Authorization", "Bearer correct-horse")])
    assert guard.knows_token([("authorization", "bearer  correct-horse ")])
    for wrong in (
        "Bearer correct-hors",
        "Bearer ",
        "correct-horse",
        "Basic correct-horse",
        "Bearer \xe9",
        "Bearer \ud800",
    ):
        assert not guard.knows_token([("Authorization", wrong)])
    assert not guard.knows_token([])
    assert not guard.knows_token([("Authorization", "Bearer correct-horse")] * 2)
    assert Guard().knows_token([])
    assert not Guard().is_token("")


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTP://Example.COM:80/", "http://example.com"),
        ("https://example.com:443", "https://example.com"),
        ("https://example.com:80", "https://example.com:80"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("*", "*"),
        *(
            (wrong, None)
            for wrong in (
                "localhost:3000",
                "null",
                "http://",
                "http://a/b",
                "http://*.a",
                "file://",
                "x",
            )
        ),
        *(
            (wrong, None)
            for wrong in (
                "http://a:0",
                "http://a:99999",
                "http://u@a",
                "http://ä.example",
                "//a",
                "http://a?",
            )
        ),
    ],
)
def test_origins_as_browsers_write_them(text: str, origin: str | None) -> None:
    if origin is not None:
        assert origin_of(text) == origin
        return
    with pytest.raises(ConfigError) as refused:
        origin_of(text)
    assert text in str(refused.value.where)
    assert refused.value.hint


def test_where_it_listens_decides_whether_there_is_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        here = listen(host, 0)
        here.listener.close()
        assert (here.is_open, here.guard.token) == (False, None)
    with_token = listen("127.0.0.1", 0, token="12345678")
    with_token.listener.close()
    assert (with_token.guard.token, with_token.made) == ("12345678", False)
    everywhere = listen(
        "0.0.0.0", 0, names=["Studio.Example"], origins=["http://a, http://b", "http://c"]
    )
    everywhere.listener.close()
    guard = everywhere.guard
    assert everywhere.is_open
    assert everywhere.made
    assert len(guard.token or "") > 20
    assert guard.origins == {"http://a", "http://b", "http://c"}
    assert {"studio.example", socket.gethostname().lower()} <= guard.hosts
    assert "0.0.0.0" not in guard.hosts
    for token in ("short", "with a space", "schlüsselwort", "line\nbreak!!"):
        with pytest.raises(ConfigError):
            listen("127.0.0.1", 0, token=token)


# Values that headers have, and parts of them, in any order and any number.
_PIECES = st.sampled_from(
    [*HERE, *ELSEWHERE, "null", "*", "http://", "://", "Bearer ", "correct-horse", "\x00", "é", ","]
)
_VALUES = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=30),
    st.lists(_PIECES, max_size=3).map("".join),
)
_NAMES = st.sampled_from(
    [
        "Host",
        "host",
        "Origin",
        "Authorization",
        "Sec-Fetch-Site",
        "Sec-Fetch-Mode",
        "Access-Control-Request-Headers",
        "x",
    ]
)


def let_in(method: str, headers: list[tuple[str, str]]) -> bool:
    """Whether the guard lets a request through, which it may under the server's names and from its
    friend's pages.
    """
    guard = Guard(frozenset({"studio"}), frozenset({"http://friend"}), "correct-horse")
    shared = guard.shared_with(headers)
    assert not any("\r" in value or "\n" in value for value in shared.values())
    assert isinstance(guard.knows_token(headers), bool)
    refusal = guard.refusal(method, headers)
    if refusal is not None:
        assert refusal.status in (400, 403)
        return False
    (host,) = [value.strip() for name, value in headers if name.lower() == "host"]
    bare = host.lower().rpartition("]")[0].strip("[") or host.lower().partition(":")[0]
    assert bare.removesuffix(".") in ("localhost", "studio", "::1") or bare.startswith("127.")
    for origin in (value.strip().lower() for name, value in headers if name == "Origin"):
        assert origin == "http://friend" or origin.partition("://")[2] == host.lower()
    return True


@settings(max_examples=500)
@given(
    st.sampled_from(["GET", "POST", "OPTIONS", "\x00"]),
    st.lists(st.tuples(_NAMES, _VALUES), max_size=6),
)
@example("GET", [("Host", "localhost"), ("Origin", "http://localhost")])
def test_whatever_a_head_says_it_is_answered_only_under_the_servers_names(
    method: str, headers: list[tuple[str, str]]
) -> None:
    let_in(method, headers)


def test_a_hundred_thousand_heads() -> None:
    source = random.Random(1)
    values = [
        *HERE,
        *ELSEWHERE,
        *(f"http://{host}" for host in (*HERE, *ELSEWHERE)),
        "http://friend",
        "null",
        "studio",
    ]
    values += [
        "Bearer correct-horse",
        "Bearer x",
        "same-origin",
        "cross-site",
        "navigate",
        "no-cors",
        "",
        "\xff",
    ]
    names = ["Host", "Host", "Origin", "Authorization", "Sec-Fetch-Site", "Sec-Fetch-Mode", "x"]

    def some_value() -> str:
        value = source.choice(values)
        kind = source.randrange(10)
        if kind == 0:
            return value + source.choice(values)
        if kind == 1:
            return source.randbytes(source.randrange(20)).decode("latin-1")
        return value if kind > 2 else value[: source.randrange(1 + len(value))]

    answered = 0
    for _ in range(100_000):
        headers = [(source.choice(names), some_value()) for _ in range(source.randrange(4))]
        answered += let_in(source.choice(["GET", "POST"]), headers)
    assert 1_000 < answered < 50_000
