"""Processes that write one directory at the same instant: one wins whole, the other result is kept
beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Waits at a step of the writing until all have come to it, or until it is clear that the others are
# kept from it. The real command follows.
CHILD = """
import sys, time
from pathlib import Path
from allhands.cli.main import main
from allhands.io import staging

me, step, ways = sys.argv[1], sys.argv[2], Path(sys.argv[3])

def met(number, patience_s=1.5):
    (ways / f"{number}-{me}").touch()
    ends = time.monotonic() + patience_s
    while time.monotonic() < ends and len(list(ways.glob(f"{number}-*"))) < 2:
        time.sleep(0.002)

number = 0
def rename(self, target, real=Path.rename):
    global number
    if out in (self.name, Path(target).name):
        number += 1
        met(number)
    return real(self, target)

def directory(*args, real=staging.make_directory, **more):
    met("checked", 60)  # both have found the place as it is now
    return real(*args, **more)

def made(*args, real=staging.make_unused, **more):
    path = real(*args, **more)
    met("made")
    return path

words = sys.argv[4:]
out = Path(words[words.index("--out") + 1]).name
staging.make_directory = directory
def flock(*_):
    raise OSError("no locks")

if "without locks" in step:
    staging.fcntl.flock = flock
if "rename" in step:
    Path.rename = rename
else:
    staging.make_unused = made
main(words)
"""
VERBS = {
    "prepare": ("data", "prepare", "ROWS", "--valid", "2", "--test", "2"),
    "tokenizer": ("tokenizer", "train", "ROWS", "--vocabulary", "300"),
}
# A file that both write, and that differs.
TELLS = {"prepare": "train.jsonl", "tokenizer": "tokenizer.json"}


def command(place: Path, which: int, verb: str) -> list[str]:
    """The words of a command, with rows of its own."""
    rows = place / f"rows{which}.jsonl"
    said = ("sail", "anchor")[which]
    texts = (f"{said} the ship {said}{number} times {said}" for number in range(60))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [str(rows) if word == "ROWS" else word for word in VERBS[verb]]


def alone(words: list[str], out: Path) -> None:
    done = [sys.executable, "-m", "allhands", *words, "--out", str(out)]
    subprocess.run(done, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("step", ["rename", "rename without locks", "start"])
def test_one_of_two_that_meet_wins_whole(verb: str, force: bool, step: str, tmp_path: Path) -> None:
    out, ways = tmp_path / "place" / "out", tmp_path / "ways"
    ways.mkdir()
    words = [command(tmp_path, which, verb) for which in (0, 1)]
    wanted = list[bytes]()
    for which in (0, 1):
        alone(words[which], tmp_path / str(which))
        wanted.append((tmp_path / str(which) / TELLS[verb]).read_bytes())
    if force:
        alone(words[0], out)
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(which), step, str(ways), *words[which]]
            + ["--out", str(out)]
            + ["--force"] * force,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for which in (0, 1)
    ]
    said = [one.communicate(timeout=120)[1] for one in running]
    codes = [one.returncode for one in running]
    assert "Traceback" not in "".join(said)
    assert sorted(codes) == [0, 2], said
    winner = codes.index(0)
    assert str(out) in said[1 - winner]
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "out-2"]
    for place, which in ((out, winner), (out.with_name("out-2"), 1 - winner)):
        assert (place / TELLS[verb]).read_bytes() == wanted[which]
        assert sorted(path.name for path in place.iterdir()) == sorted(
            path.name for path in (tmp_path / str(which)).iterdir()
        )
