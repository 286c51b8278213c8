"""``allhands dashboard``: what it tells of runs, and whom it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import call_allhands
from dashboards import Dashboard, dashboard
from written_runs import HOSTILE, write_run, write_samples

from allhands.errors import DataError
from allhands.observe.monitor import encode_sample, read_samples
from allhands.plan.kept import keep_plan
from allhands.report.dashboard.runs import (
    ask_to_stop,
    find_runs,
    head_of,
    logs_of,
    summary_of,
    tail_of,
)
from allhands.report.facts import read_facts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them two directories down, and what is none."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one")
    write_run(folder / "deep" / "two", ranks=2, ended=None, sampled=[("hello", HOSTILE)])
    write_samples(folder / "deep" / "two")
    (folder / "deep" / "two" / "logs" / "rank-0.log").write_text(f"step 1\n{HOSTILE}\n")
    (folder / "deep" / "two" / "logs" / "secret.txt").write_text("no log\n")
    write_run(folder / "one" / "checkpoints" / "no")
    (folder / "empty").mkdir()
    (folder / ".hidden").mkdir()
    write_run(folder / ".hidden" / "three")
    return folder


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Dashboard]:
    with dashboard(root) as running:
        yield running


# --- what there is --------------------------------------------------------------------------------


def test_runs_are_found_below_a_directory_the_latest_first(root: Path) -> None:
    os.utime(root / "one" / "metrics.jsonl", (1, 1))
    assert list(find_runs(root)) == ["deep/two", "one"]
    assert list(find_runs(root / "one")) == ["one"]
    assert find_runs(root / "empty") == {}


def test_a_run_in_a_run_of_the_same_name_is_found_too(tmp_path: Path) -> None:
    for directory in (tmp_path / "runs", tmp_path / "runs" / "runs", tmp_path / "runs" / "other"):
        write_run(directory)
    found = find_runs(tmp_path / "runs")
    assert len(found) == len(set(found.values())) == 3
    assert found["runs"] == tmp_path / "runs" / "runs"


def test_a_run_in_one_line(root: Path) -> None:
    one = summary_of("one", root / "one")
    assert one is not None
    assert (one.status, one.step, one.total_steps, one.ranks) == ("finished", 60, 60, 1)
    assert one.loss == pytest.approx(2 + 2 / 7)
    assert one.valid_loss == pytest.approx(2.1 + 2 / 7)
    assert not one.can_stop
    assert summary_of("empty", root / "empty") is None


def test_the_end_of_a_log_and_of_nothing_else(root: Path, tmp_path: Path) -> None:
    run = root / "deep" / "two"
    assert logs_of(run) == ["rank-0.log"]
    assert tail_of(run, "rank-0.log").startswith("step 1\n")
    for name in ("secret.txt", "../metrics.jsonl", "/etc/passwd", ""):
        with pytest.raises(DataError):
            tail_of(run, name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("".join(f"line {i}\n" for i in range(10_000)))
    tail = tail_of(tmp_path, "rank-0.log")
    assert tail.startswith("line ")
    assert tail.endswith("line 9999\n")
    assert len(tail) < 20_000


def test_only_a_process_of_the_run_is_asked_to_stop(tmp_path: Path) -> None:
    """A sample is forged easily, and the number in it may be another program's by now: that one is
    left alone.
    """
    run, other = (write_run(tmp_path / name, ended=None) for name in ("run", "other"))
    for one in (run, other):
        write_samples(one, ranks=1, host=lambda _: os.uname().nodename)
    (file,), (its,) = ((one / "logs").glob("monitor-*.jsonl") for one in (run, other))
    (run / "logs" / "monitor-rank-7.jsonl").symlink_to(its)
    (run / "logs" / "rank-0.log").touch()

    def written_for(process: subprocess.Popen[bytes]) -> None:
        sample = replace(read_samples(run)[-1], pid=process.pid, time=time.time(), ended=False)
        file.write_text(f"{encode_sample(sample)}\n")

    wait = (
        "import sys, time, signal\nsignal.signal(signal.SIGTERM, lambda *_: exit(7))\n"
        "held = [open(*word.rsplit(':', 1)) for word in sys.argv[2:]]\nprint('', flush=True)\ntime.sleep(20)"
    )
    reads = [[f"{file}:r"]] if sys.platform == "linux" else []
    strangers = [
        [],
        [f"{its}:a"],
        [f"{run / 'logs' / 'monitor-rank-7.jsonl'}:a"],
        [f"{run / 'logs' / 'rank-0.log'}:a"],
    ]
    for held in [[f"{file}:a"], *strangers, *reads]:
        with subprocess.Popen(
            [sys.executable, "-c", wait, "allhands", *held], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            written_for(process)
            ours = held == [f"{file}:a"]
            assert (head_of(read_facts(run)) is not None) == ours, held
            if ours:
                assert str(process.pid) in ask_to_stop(run)
                assert process.wait(10) == 7
            else:
                with pytest.raises(DataError) as caught:
                    ask_to_stop(run)
                assert caught.value.code == "run-not-stoppable"
                assert process.poll() is None
                process.kill()


def test_who_has_got_the_number_of_a_process_is_not_asked(tmp_path: Path) -> None:
    """The sample was written before this process began."""
    run = write_run(tmp_path / "run", ended=None)
    write_samples(run, ranks=1, host=lambda _: os.uname().nodename)
    (file,) = (run / "logs").glob("monitor-*.jsonl")
    wait = f"import time\nheld = open({str(file)!r}, 'a')\nprint('', flush=True)\ntime.sleep(20)"
    with subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sample = replace(
            read_samples(run)[-1], pid=process.pid, time=time.time() - 1000.0, ended=False
        )
        file.write_text(f"{encode_sample(sample)}\n")
        assert head_of(read_facts(run)) is None
        process.kill()


# --- over HTTP ------------------------------------------------------------------------------------


def test_the_page_its_files_and_what_it_asks_for(served: Dashboard) -> None:
    status, page, headers = served.ask("/")
    assert status == 200
    assert "<script src=" in page
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
    assert "uPlot" in served.ask("/assets/script.js")[1]
    assert served.ask("/assets/style.css")[2]["content-type"].startswith("text/css")
    assert {run["name"]: run["status"] for run in served.json("/api/runs")}["one"] == "finished"
    both = served.json("/api/page?run=one&run=deep/two")
    assert [run["name"] for run in both["runs"]] == ["one", "deep/two"]
    assert [one["process"] for one in both["runs"][1]["processes"]] == ["rank 0", "rank 1"]
    labels = {line["label"] for line in both["charts"]["loss-steps"]["lines"]}
    assert any(label.startswith("one") for label in labels)
    assert any(label.startswith("two") for label in labels)
    assert served.json("/api/page?run=none")["runs"] == []


def test_a_run_beside_its_plan_and_its_phases(served: Dashboard, root: Path) -> None:
    """As a report has them: a step took half of the second that was planned."""
    prediction = {"step_s": 1.0, "exposed_s": 0.0}
    plan = {
        **{
            "time": 1.0,
            "options": {},
            "processor": "cpu",
            "device": None,
            "steps": 60,
            "start_s": 0.0,
        },
        **{"step": {"tokens": 200.0}, "memory": [], "measured": None},
        "machines": [{"machines": 1, "prediction": prediction, "training_s": 60.0}],
    }
    keep_plan(root / "one", plan)
    found = served.json("/api/page?run=one")
    assert "Planned and measured" in found["html"]
    assert "A step: 500 ms, 0.50 times the 1 s planned" in found["html"]
    assert [line["label"] for line in found["charts"]["phases-0"]["lines"]][1] == "compute"


def test_what_comes_from_a_run_is_text(served: Dashboard) -> None:
    found = served.json("/api/page?run=deep/two")
    assert "<img" not in found["html"]
    assert "&lt;/script&gt;&lt;script&gt;" in found["html"]
    assert HOSTILE in served.json("/api/log?run=deep/two&log=rank-0.log")["text"]


@pytest.mark.parametrize(
    "path",
    [
        "/api/log?run=deep/two&log=secret.txt",
        "/api/log?run=deep/two&log=..%2Fmetrics.jsonl",
        "/api/log?run=..&log=rank-0.log",
        "/assets/..%2Fdashboard.html",
        "/assets/report.css",
        "/nothing",
    ],
)
def test_nothing_else_is_handed_out(served: Dashboard, path: str) -> None:
    assert served.ask(path)[0] == 404


def test_other_names_and_other_pages_are_refused(served: Dashboard) -> None:
    """A name that somebody else's server has made point here, and a request that another page
    makes.
    """
    assert served.ask("/", headers={"Host": "evil.example"})[0] == 400
    status, told, _ = served.ask("/api/stop?run=one", method="POST")
    assert (status, "own page" in told) == (403, True)
    assert served.ask("/api/stop?run=one")[0] == 405
    status, told, _ = served.ask("/api/stop?run=one", method="POST", headers={"X-Allhands": "stop"})
    assert (status, "no process of this run" in told) == (404, True)


def test_others_than_this_computer_need_the_token(root: Path) -> None:
    with dashboard(root, "--host", "0.0.0.0") as open_to_all:
        here = replace(
            open_to_all, address=f"http://127.0.0.1:{open_to_all.address.rsplit(':', 1)[1]}"
        )
        token = open_to_all.token
        assert token is not None
        assert len(token) > 20
        for path in (
            "/",
            "/api/runs",
            "/assets/script.js",
            "/?token=wrong",
            "/?token=%C3%A9",
            "/?token=%FF",
        ):
            assert here.ask(path)[0] == 403, path
        assert here.ask("/api/runs", headers={"Cookie": f"allhands-token={token}"})[0] == 200
        assert here.ask("/api/runs", headers={"Cookie": "allhands-token=wrong"})[0] == 403
        assert here.ask("/api/runs", headers={"Cookie": "allhands-token=\xe9"})[0] == 403
        # At the address that was printed, too, which is this computer's own; not under a name that
        # points to it.
        assert open_to_all.ask("/api/runs", headers={"Cookie": f"allhands-token={token}"})[0] == 200
        assert (
            here.ask("/", headers={"Host": "evil.example", "Cookie": f"allhands-token={token}"})[0]
            == 400
        )


def test_it_ends_cleanly(root: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with dashboard(root) as running:
            running.json("/api/runs")
            running.process.send_signal(number)
            # That is how it is meant to end: as `allhands serve` does.
            assert running.process.wait(20) == 0
            assert running.process.stderr is not None
            assert running.process.stderr.read() == ""


def test_wrong_input_is_one_clear_message(served: Dashboard, root: Path, tmp_path: Path) -> None:
    port = served.address.rsplit(":", 1)[1].strip("/")
    taken = call_allhands("dashboard", str(root), "--port", port)
    assert (taken.returncode, "cannot listen" in taken.stderr, "Traceback" in taken.stderr) == (
        2,
        True,
        False,
    )
    none = call_allhands("dashboard", str(tmp_path / "none"))
    assert (none.returncode, "no such directory" in none.stderr) == (3, True)
    short = call_allhands("dashboard", str(root), "--token", "abc")
    assert (short.returncode, "can be guessed" in short.stderr) == (2, True)
    assert json.loads(served.ask("/api/log?run=none&log=x")[1])["code"] == "run-missing"


def test_the_time_of_a_run_is_that_of_all_its_starts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60, step_s=0.5, ended=None)
    once = summary_of("run", run)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    started = next(json.loads(line) for line in lines if '"started"' in line)
    with (run / "metrics.jsonl").open("a") as file:
        again = {**started, "step": 60, "elapsed_s": 31.0, "total_steps": 100}
        print(json.dumps(again), file=file)
    resumed = summary_of("run", run)
    assert once is not None
    assert resumed is not None
    assert (once.trained_s, resumed.trained_s) == (30.0, 31.0)
