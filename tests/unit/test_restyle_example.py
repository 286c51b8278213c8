"""The program examples/restyle.py: which words it changes, and that the same data give the same
result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "restyle.py"
RULES = """
words: {hello: ahoy, you: ye, no: nay}
phrases: {"thank you": thank ye}
suffixes: {ing: in'}
"""
CHAT = {
    "messages": [
        {"role": "user", "content": "hello, is it you?"},
        {"role": "assistant", "content": "Thank you! `no you`, sailing to http://you.no"},
    ]
}


def restyled(source: Path, out: Path, *flags: str) -> list[dict[str, object]]:
    subprocess.run(
        [sys.executable, str(EXAMPLE), str(source), str(out), *flags],
        check=True,
        capture_output=True,
    )
    return [
        json.loads(line) for line in (out / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def test_only_words_of_answers_change(tmp_path: Path) -> None:
    source, rules = tmp_path / "in", tmp_path / "rules.yaml"
    source.mkdir()
    rows = [CHAT, {"prompt": "hello", "completion": "HELLO, no king"}, {"text": "hello"}]
    (source / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rules.write_text(RULES)
    chat, completion, text = restyled(source, tmp_path / "out", "--rules", str(rules))
    answer = {"role": "assistant", "content": "Thank ye! `no you`, sailin' to http://you.no"}
    assert chat == {"messages": [CHAT["messages"][0], answer]}
    assert completion == {"prompt": "hello", "completion": "AHOY, nay king"}
    assert text == {"text": "hello"}


def test_a_share_stays_as_it_is_the_same_every_time(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    rows = [{"prompt": f"question {number}", "completion": "hello you"} for number in range(500)]
    (source / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    one = restyled(source, tmp_path / "one", "--mix", "0.2")
    assert one == restyled(source, tmp_path / "two", "--mix", "0.2")
    assert one != restyled(source, tmp_path / "three", "--mix", "0.2", "--seed", "1")
    assert 60 < sum(row["completion"] == "hello you" for row in one) < 140
