"""The command line of ssh: what a real shell makes of it is, word for word, what was meant."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from allhands.cluster import ssh
from allhands.cluster.ssh import SshOptions
from allhands.errors import ConfigError

# Does with its words what ssh and sshd do: everything after the host is joined and given to the person's shell.
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
words = st.lists(st.one_of(st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8", exclude_characters="\0"))))


@pytest.fixture(scope="module")
def pretended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("a directory with 'quotes'") / "ssh"
    path.write_text(PRETENDED)
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_SSH", raising=False)


@settings(max_examples=150)
@given(words)
@example(HOSTILE)
def test_a_real_shell_finds_the_words_that_were_meant(argv: list[str]) -> None:
    *_, host, text = ssh.command("node1", ["printf", "%s\\0", "begin", *argv])
    assert host == "node1"
    done = subprocess.run(["/bin/sh", "-c", text], capture_output=True, check=True)
    assert [word.decode() for word in done.stdout.split(b"\0")[1:-1]] == argv


def test_the_whole_command_line(pretended: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLHANDS_SSH", f'{shlex.quote(str(pretended))} -F "my file"')
    script = "import sys; sys.stdout.write(ascii(sys.argv[1:]))"
    argv = ssh.command("me@node1", [sys.executable, "-c", script, *HOSTILE])
    assert argv[:3] == [str(pretended), "-F", "my file"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == ascii(HOSTILE)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_asked_and_nothing_forwarded() -> None:
    argv = ssh.command("node1", ["true"], SshOptions(7, 2, 4))
    options = {argv[i + 1] for i, word in enumerate(argv) if word == "-o"}
    assert options >= {
        "BatchMode=yes",
        "ConnectTimeout=7",
        "ServerAliveInterval=2",
        "ServerAliveCountMax=4",
        "RequestTTY=no",
        "ForwardAgent=no",
        "ControlMaster=no",
    }
    assert argv[0] == "ssh"
    assert argv[-4:] == ["-T", "--", "node1", "true"]


@pytest.mark.parametrize(
    "host",
    ["", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a\nb", "a\0b", "@a", "me@-x", "-me@a", "a@b@c", "a'b", "~", "[x]"],
)
def test_a_host_that_is_no_name(host: str) -> None:
    for call in (lambda: ssh.command(host, ["true"]), lambda: ssh.real_name(host), lambda: ssh.answers(host, 1)):
        with pytest.raises(ConfigError, match="not the name"):
            call()


def test_a_word_with_nul() -> None:
    with pytest.raises(ConfigError, match="NUL"):
        ssh.command("node1", ["a\0b"])


@pytest.mark.parametrize("text", ['"unclosed', "\\", " ", "''"])
def test_a_program_that_is_not_understood(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", text)
    with pytest.raises(ConfigError) as refusal:
        ssh.command("node1", ["true"])
    assert refusal.value.where == "ALLHANDS_SSH"


def test_the_environment_never_reaches_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALLHANDS_SSH", "no-such-ssh; touch pwned; $(touch pwned)")
    assert ssh.command("node1", ["true"])[:5] == ["no-such-ssh;", "touch", "pwned;", "$(touch", "pwned)"]
    assert not ssh.answers("node1", 5)
    with pytest.raises(ConfigError, match="cannot be run"):
        ssh.real_name("node1")
    assert list(tmp_path.iterdir()) == []


def test_answers_within_its_time(pretended: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", shlex.quote(str(pretended)))
    assert ssh.answers("node1", 10)
    sleeper = tmp_path / "ssh"
    sleeper.write_text("#!/bin/sh\nexec sleep 30\n")
    sleeper.chmod(0o755)
    monkeypatch.setenv("ALLHANDS_SSH", str(sleeper))
    assert not ssh.answers("node1", 0.3)
    monkeypatch.setenv("ALLHANDS_SSH", "false")
    assert not ssh.answers("node1", 10)


def test_an_alias_is_resolved_by_ssh_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "my config"
    config.write_text("Host big\n  HostName 192.0.2.7\n")
    monkeypatch.setenv("ALLHANDS_SSH", f"ssh -F '{config}'")
    assert ssh.real_name("big") == "192.0.2.7"
    assert ssh.real_name("me@big") == "192.0.2.7"
    assert ssh.real_name("small") == "small"
