"""The command line of ssh: what a real shell makes of it is, word for word, what was meant."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allhands.cluster import ssh
from allhands.cluster.ssh import SshOptions, SshTrouble
from allhands.errors import ConfigError

# Does with its words what ssh and sshd do: everything after the host is joined and given to the
# person's shell.
PRETENDED = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
shift 2
exec /bin/sh -c "$*"
"""
HOSTILE = [
    "'",
    '"',
    "a'b\"c",
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "| touch pwned",
    "a\nb\n",
    "\\",
    "\\'",
    "$HOME",
    "~",
    "*",
    "-rf",
    "--",
    "",
    " ",
    "\t",
    "!!",
    "#",
    "é\u2028",
    "\x1b[31m",
]
words = st.lists(
    st.one_of(
        st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8", exclude_characters="\0"))
    )
)


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a directory with 'quotes'") / "ssh"
    path.write_text(PRETENDED)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_SSH", raising=False)


def test_a_program_below_the_home_directory_is_that_of_the_other_computer() -> None:
    *_, text = ssh.command("node1", ["~/a place/printf $x", "%s", "~/b"])
    done = subprocess.run(
        ["/bin/sh", "-c", f"echo {text}"],
        env={"HOME": "/there"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "/there/a place/printf $x %s ~/b\n"


@settings(max_examples=150)
@given(words)
@example(HOSTILE)
def test_a_real_shell_finds_the_words_that_were_meant(argv: list[str]) -> None:
    *_, host, text = ssh.command("node1", ["printf", "%s\\0", "begin", *argv])
    assert host == "node1"
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True)
    assert [word.decode() for word in done.stdout.split(b"\0")[1:-1]] == argv


def test_the_whole_command_line(
    pretended: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLHANDS_SSH", f'{shlex.quote(str(pretended))} -F "my file"')
    script = "import sys; sys.stdout.write(ascii(sys.argv[1:]))"
    argv = ssh.command("me@node1", [sys.executable, "-c", script, *HOSTILE])
    assert argv[:3] == [str(pretended), "-F", "my file"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == ascii(HOSTILE)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_asked_and_nothing_forwarded() -> None:
    argv = ssh.command("node1", ["true"], SshOptions(7))
    options = {argv[i + 1] for i, word in enumerate(argv) if word == "-o"}
    assert options >= {
        "BatchMode=yes",
        "ConnectTimeout=7",
        "ServerAliveInterval=3",
        "ServerAliveCountMax=3",
        "RequestTTY=no",
        "ForwardAgent=no",
        "ControlMaster=no",
    }
    assert argv[0] == "ssh"
    assert argv[-4:] == ["-T", "--", "node1", "true"]


@pytest.mark.parametrize(
    "host",
    [
        "",
        "-oProxyCommand=x",
        "a b",
        "a;b",
        "$(x)",
        "a\nb",
        "a\0b",
        "@a",
        "me@-x",
        "-me@a",
        "a@b@c",
        "a'b",
        "~",
        "[x]",
    ],
)
def test_a_host_that_is_no_name(host: str) -> None:
    for call in (
        lambda: ssh.command(host, ["true"]),
        lambda: ssh.real_name(host),
        lambda: ssh.trouble(host, 1),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.code == "host-name-invalid"


def test_a_word_with_nul() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        ssh.command("node1", ["a\0b"])


@pytest.mark.parametrize("text", ['"unclosed', "\\", " ", "''"])
def test_a_program_that_is_not_understood(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", text)
    with pytest.raises(ConfigError) as refusal:
        ssh.command("node1", ["true"])
    assert refusal.value.where == "ALLHANDS_SSH"


def test_the_environment_never_reaches_a_shell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLHANDS_SSH", "no-such-ssh; touch pwned; $(touch pwned)")
    assert ssh.command("node1", ["true"])[:5] == [
        "no-such-ssh;",
        "touch",
        "pwned;",
        "$(touch",
        "pwned)",
    ]
    found = ssh.trouble("node1", 5)
    assert found is not None
    assert found.lasting
    assert "cannot be run: No such file or directory" in (found.reason or "")
    with pytest.raises(ConfigError) as caught:
        ssh.real_name("node1")
    assert caught.value.code == "ssh-missing"
    assert list(tmp_path.iterdir()) == []


def test_answers_within_its_time(
    pretended: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(pretended)))
    assert ssh.trouble("node1", 10) is None
    # What it leaves behind holds on to its output, and is not waited for.
    _pretend(monkeypatch, tmp_path, "sleep 3 & exit 0")
    began = time.monotonic()
    assert ssh.trouble("node1", 10) is None
    assert time.monotonic() - began < 2
    _pretend(monkeypatch, tmp_path, "exec sleep 30")
    silent = ssh.trouble("node1", 0.3)
    assert silent == SshTrouble(
        None, "look whether it is switched on; make `ssh node1 true` work without a question"
    )
    _pretend(monkeypatch, tmp_path, "exit 1")
    failed = ssh.trouble("node1", 10)
    assert failed is not None
    assert (failed.kind, failed.lasting) == ("login", False)
    assert failed.reason
    assert "`ssh node1 true`" in failed.hint


def _pretend(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str) -> None:
    program = directory / "ssh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(program)))


# What OpenSSH says: its words, whether waiting may help, and a word of what to do.
SAID = {
    "name": (
        "ssh: Could not resolve hostname nosuch: Name or service not known",
        True,
        "correct the name",
    ),
    "key": ("me@nosuch: Permission denied (publickey,password).", True, "ssh-copy-id nosuch"),
    "keys": (
        "Received disconnect from ::1 port 22:2: Too many authentication failures",
        True,
        "IdentityFile",
    ),
    "unknown host key": ("Host key verification failed.", True, "accept its key if it is right"),
    "no server": (
        "ssh: connect to host nosuch port 22: Connection refused",
        False,
        "start the ssh server there",
    ),
    "no way": (
        "ssh: connect to host nosuch port 22: No route to host",
        False,
        "make `ssh nosuch true` work",
    ),
    "late": (
        "ssh: connect to host nosuch port 22: Connection timed out",
        False,
        "make `ssh nosuch true` work",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_ssh_says_itself_why(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words, lasting, hint = SAID[case]
    (tmp_path / "said").write_bytes(
        b"Welcome. Permission denied to strangers.\r\n" + words.encode() + b"\r\n\r\n"
    )
    _pretend(monkeypatch, tmp_path, f"cat {shlex.quote(str(tmp_path / 'said'))} >&2; exit 255")
    found = ssh.trouble("nosuch", 10)
    assert found is not None
    assert (found.reason, found.lasting) == (words, lasting)
    assert hint in found.hint


def test_a_changed_host_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [
        "@" * 60,
        "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @",
        "@" * 60,
        "IT IS POSSIBLE ...",
    ]
    (tmp_path / "said").write_text("\n".join([*lines, "Host key verification failed.", ""]))
    _pretend(monkeypatch, tmp_path, f"cat {shlex.quote(str(tmp_path / 'said'))} >&2; exit 255")
    found = ssh.trouble("node1", 10)
    assert found is not None
    assert found.lasting
    assert found.reason == "REMOTE HOST IDENTIFICATION HAS CHANGED: Host key verification failed."
    assert "ssh-keygen -R" in found.hint


def test_what_is_said_is_safe_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "said").write_bytes(b"\x1b]0;title\x07\xff " + b"x" * 100_000)
    _pretend(monkeypatch, tmp_path, f"cat {shlex.quote(str(tmp_path / 'said'))} >&2; exit 255")
    found = ssh.trouble("node1", 10)
    assert found is not None
    assert found.reason is not None
    assert found.reason.isprintable()
    assert len(found.reason) < 200


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_the_real_ssh_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setenv("ALLHANDS_SSH", f"ssh -F /dev/null -p {taken.getsockname()[1]}")
        refused = ssh.trouble("127.0.0.1", 10)
    assert refused is not None
    assert (refused.reason or "").endswith("Connection refused")
    assert not refused.lasting
    monkeypatch.setenv("ALLHANDS_SSH", "ssh -F /dev/null")
    unknown = ssh.trouble("no-such-name.invalid", 10)
    assert unknown is not None
    assert "Could not resolve hostname no-such-name.invalid" in (unknown.reason or "")
    assert unknown.lasting


def test_an_alias_is_resolved_by_ssh_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "my config"
    config.write_text("Host big\n  HostName 192.0.2.7\n")
    monkeypatch.setenv("ALLHANDS_SSH", f"ssh -F '{config}'")
    assert ssh.real_name("big") == "192.0.2.7"
    assert ssh.real_name("me@big") == "192.0.2.7"
    assert ssh.real_name("small") == "small"


def test_names_that_look_like_one_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(
        "Host studio-1 Studio-2 *.lan !other\n  HostName 10.0.0.1\n  User me\n"
    )
    (tmp_path / ".ssh" / "known_hosts").write_text(
        "|1|abc=|def= ssh-ed25519 AAAA\nmacbook,10.0.0.9 ssh-ed25519 AAAA\n[minimac]:2222 ssh-ed25519 AAAA\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ALLHANDS_SSH", "ssh")
    assert set(ssh.near_names("me@studio1")) == {"studio-1", "studio-2"}
    assert ssh.near_names("MacBok") == ("macbook",)
    assert ssh.near_names("mini-mac") == ("minimac",)
    assert ssh.near_names("10.0.0.8") == ()
    assert ssh.near_names("wholly-else") == ()
    (tmp_path / "other").write_text("Host gpubox\n")
    monkeypatch.setenv("ALLHANDS_SSH", f"ssh -F {tmp_path / 'other'}")
    assert ssh.near_names("gpu-box") == ("gpubox",)
