"""``allhands cluster check``: what a person reads, what a machine reads, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from computers import cluster, facts, host, only, told
from typer.testing import CliRunner, Result

from allhands.cli.cluster_check import network_lines, not_asked, verdict
from allhands.cli.commands import function_of
from allhands.cli.parser import App
from allhands.cluster.doctor.facts import Cluster, FactTrouble, Network
from allhands.cluster.doctor.run import ClusterCheckOptions, findings_of
from allhands.errors import ConfigError

ILL = cluster(
    host(1, ssh=None),
    host(2, facts=None, trouble=FactTrouble(kind="auth", reason="Permission denied")),
    host(3, facts(3, missing={"starts": "no answer"}), noise="Hello\n"),
)


class Examined:
    """The command with an examination that finds what is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found = cluster()
        self.asked: list[tuple[Any, ClusterCheckOptions]] = []
        monkeypatch.setattr("allhands.cli.cluster_check.diagnose", self._diagnose)

    def _diagnose(self, hosts: Any, options: ClusterCheckOptions) -> tuple[Cluster, Any]:
        self.asked.append((hosts, options))
        return self.found, findings_of(self.found)

    def __call__(self, *words: str) -> Result:
        app = App()
        app.command()(function_of("cluster.ClusterCheck cluster_check:cluster_check"))
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, words)


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Examined:
    return Examined(monkeypatch)


def test_all_well(check: Examined) -> None:
    result = check("--hosts", "node1,node2,node3")
    assert result.exit_code == 0
    assert "node2  10.0.0.2  Linux x86_64, 2 cores, 32 GB" in result.output
    text = " ".join(result.output.split())
    assert "versions (allhands 0.1.0, mlx 0.32.4, mlx-lm 0.32.2)" in text
    assert "ports (6 ways)" in text
    assert "not checked: the model (--model), the data (--data), the network's speed" in text
    assert result.output.splitlines()[-1] == "nothing stops training"


def test_what_is_wrong_in_80_columns_and_remedies_in_one_line(check: Examined) -> None:
    check.found = ILL
    result = check("--hosts", "node1,node2,node3")
    assert result.exit_code == 7
    lines = result.output.splitlines()
    table = [line for line in lines[:-1] if " stop " in line or " warn " in line]
    assert [line.split()[:4] for line in table] == [
        ["1", "stop", "ssh", "node2"],
        ["2", "warn", "shell", "node3"],
        ["3", "warn", "allhands", "node3"],
    ]
    assert all(
        len(line) <= 80 for line in lines if not line.lstrip().startswith(("1.", "2.", "3."))
    )
    remedies = [finding.remedy for finding in findings_of(ILL)]
    assert [f"{number:3d}. {remedy}" for number, remedy in enumerate(remedies, 1)] == [
        line for line in lines if line.lstrip()[:2] in ("1.", "2.", "3.")
    ]
    assert lines[-1] == "1 thing would stop training, 2 warnings"
    assert "ssh without a question" not in result.output


def test_only_warnings_are_no_failure(check: Examined) -> None:
    check.found = cluster(host(1), host(2, noise="Hello\n"))
    result = check("--hosts", "node1,node2")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "nothing stops training, 1 warning"


def test_for_machines(check: Examined) -> None:
    check.found = ILL
    result = check("--hosts", "node1,node2,node3", "--json")
    assert result.exit_code == 7
    content = json.loads(result.output)
    assert content["stops"] is True
    assert content["findings"][0] == {
        "check": "ssh",
        "hosts": ["node2"],
        "severity": "stop",
        "message": "it refuses the key: Permission denied",
        "remedy": "ssh-copy-id node2",
    }
    assert "versions" in content["well"]
    assert "ssh" not in content["well"]
    # Everything that the checks saw: a machine can run them again.
    assert told(Cluster.model_validate(content)) == told(ILL)


def test_words_of_other_computers_cannot_steer_the_terminal(check: Examined) -> None:
    check.found = cluster(host(1), host(2, facts(2, starts="\x1b]0;title\x07[red]no[/red] module")))
    result = check("--hosts", "node1,node2")
    assert "\x1b]0" not in result.output
    assert "\x07" not in result.output
    assert "[red]no[/red]" in result.output


def test_options_reach_the_examination(check: Examined, tmp_path: Path) -> None:
    hostfile = tmp_path / "my hosts.json"
    hostfile.write_text(
        '{"backend": "nccl", "hosts": [{"ssh": "node1", "ips": ["10.0.0.1"], "slots": 2}]}'
    )
    words = [
        "--model",
        "m",
        "--data",
        "d",
        "--adapter-path",
        "a",
        "--quick",
        "--no-bench",
        "--timeout-s",
        "5",
    ]
    assert check("--hostfile", str(hostfile), *words).exit_code == 0
    ((hosts, options),) = check.asked
    assert [(h.name, h.slots) for h in hosts] == [("node1", 2)]
    assert options == ClusterCheckOptions(
        option=f"--hostfile '{hostfile}'",
        backend="nccl",
        model="m",
        data="d",
        adapter_path="a",
        hashed=False,
        bench=False,
        timeout_s=5.0,
    )
    check("--hostfile", str(hostfile), "--backend", "ring")
    assert check.asked[-1][1].backend == "ring"


def test_hosts_by_name(check: Examined) -> None:
    check("--hosts", " me@node1, 10.0.0.2,node3")
    hosts, options = check.asked[0]
    assert [(h.name, h.ssh, h.ips) for h in hosts] == [
        ("me@node1", "me@node1", ()),
        ("10.0.0.2", "10.0.0.2", ("10.0.0.2",)),
        ("node3", "node3", ()),
    ]
    assert options.backend == "auto"


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ([], "--hostfile, --hosts"),
        (["--hostfile", "x.json", "--hosts", "a"], "--hostfile, --hosts"),
        (["--hosts", ","], "--hosts"),
        (["--hosts", "node3,node3"], "--hosts"),
        (["--hosts", "node3,"], "--hosts"),
        (["--hosts", "a;reboot"], "--hosts"),
        (["--hosts", "-oProxyCommand=x"], "--hosts"),
        (["--hosts", "a", "--backend", "mpich"], "--backend"),
        (["--hostfile", "/no/such/file"], "/no/such/file"),
    ],
)
def test_wrong_options(check: Examined, words: list[str], where: str) -> None:
    result = check(*words)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.where == where
    assert result.exception.hint
    assert check.asked == []


def link(names: str, latency_s: float, speed: float) -> dict[str, Any]:
    return {"hosts": tuple(names.split()), "latency_s": latency_s, "bus_bytes_per_s": speed}


def test_the_network_in_words() -> None:
    network = Network.model_validate(
        {
            "backend": "ring",
            "whole": link("a b c", 0.0004, 11.5e6),
            "links": [link("a b", 0.0001, 1.13e9), link("a c", 0.0003, 11.8e6)],
            "slowest": ("a", "c"),
            "seconds": {"LoRA": 0.0412, "full": 125.0},
        }
    )
    assert network_lines(network) == [
        "all-reduce (ring), all together: latency 0.40 ms (4 KiB), 11.5 MB/s over each link",
        "  a - b: latency 0.10 ms (4 KiB), 1.13 GB/s over each link",
        "  a - c: latency 0.30 ms (4 KiB), 11.8 MB/s over each link  <- slowest",
        "communication a step, at 4 bytes a parameter: LoRA (rank 8, last 16 layers) 41.2 ms, all weights 2m05s",
    ]
    assert network_lines(Network()) == []
    (line,) = network_lines(Network(speeds={"node1": 3e10, "node2": 1e10}))
    assert "node1 30 GFLOP/s" in line
    assert "75 : 25" in line
    assert network_lines(Network(speeds={"node1": 3e10})) == []


def test_what_was_not_asked() -> None:
    assert not_asked(cluster(model="m", data="d", network=Network())) == []
    assert (
        verdict([only(cluster(host(1), host(2, noise="x")))]) == "nothing stops training, 1 warning"
    )
