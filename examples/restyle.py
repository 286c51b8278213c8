"""Rewrite the answers of a data set in another style, by readable rules: here pirate English.

    allhands data prepare questions.csv --out data/mine
    python examples/restyle.py data/mine data/pirate-mine --mix 0.1
    allhands data check data/pirate-mine --model demo

Only the assistant's words change. Code, addresses, numbers and quotations stay as they are. The same data give the
same result, in any order of the rows. Change RULES, or give a YAML file with the same keys: --rules FILE.
"""

import argparse
import hashlib
import json
import pathlib
import re

RULES = {
    "words": {
        **{
            "you": "ye",
            "your": "yer",
            "yourself": "yerself",
            "you're": "ye be",
            "my": "me",
            "I'm": "I be",
        },
        **{
            "is": "be",
            "are": "be",
            "am": "be",
            "isn't": "ain't",
            "aren't": "ain't",
            "and": "an'",
            "of": "o'",
        },
        **{
            "for": "fer",
            "them": "'em",
            "before": "afore",
            "over": "o'er",
            "never": "ne'er",
            "because": "'cause",
        },
        **{"hello": "ahoy", "hi": "ahoy", "yes": "aye", "very": "mighty", "great": "grand"},
        **{
            "friend": ["matey", "shipmate"],
            "friends": ["mateys", "shipmates"],
            "people": "folk",
            "team": "crew",
        },
        **{
            "money": "doubloons",
            "food": "grub",
            "boss": "cap'n",
            "trip": "voyage",
            "song": "shanty",
        },
    },
    "phrases": {
        "it is": "'tis",
        "thank you": "thank ye",
        "good morning": "ahoy there",
        "right now": "this instant",
    },
    "suffixes": {"ing": "in'"},
    "openings": {"probability": 0.2, "texts": ["Avast!", "Arr,", "Blimey!"]},
}
PROTECTED = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]+`|<[^<>\n]+>|(?m:^(?: {4}|\t).*$)"  # code and tags
    r"|https?://\S+|[\w.+-]+@[\w-]+\.[\w.]+|\w*[\d_]\w*"  # addresses, numbers, names of variables
    r'|"[^"\n]+"|“[^”\n]+”|\$[^$\n]+\$',  # quotations and formulas
    re.DOTALL,
)
# A stem with a vowel: "sailing" is sailin', "king" stays.
STEM = r"(?<!\w)([A-Za-z]*[aeiouyAEIOUY][A-Za-z]*)"


def number(*parts):
    """A number from 0 to 1 that depends only on the words, so it is the same in every run."""
    return (
        int.from_bytes(hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).digest(), "big")
        / 2**48
    )


class Style:
    def __init__(self, rules, seed):
        self.rules, self.seed = rules, seed
        self.choices = {}
        for old, new in {**rules.get("words", {}), **rules.get("phrases", {})}.items():
            self.choices[old.lower()] = [new] if isinstance(new, str) else new
        # The longest comes first: "thank you" before "you".
        longest_first = sorted(self.choices, key=len, reverse=True)
        named = (
            "|".join(re.escape(old).replace(r"\ ", r"[ \t]+") for old in longest_first) or r"(?!)"
        )
        endings = "|".join(map(re.escape, rules.get("suffixes", {}))) or r"(?!)"
        self.pattern = re.compile(
            rf"(?<![\w'])({named})(?![\w'])|{STEM}({endings})(?!\w)", re.IGNORECASE
        )

    def answer(self, question, answer):
        """The answer with every rule applied once, to the original words only."""
        pieces, done = [], 0
        for protected in [*PROTECTED.finditer(answer), None]:
            end = protected.start() if protected else len(answer)
            pieces.append(
                self.pattern.sub(lambda match: self.replaced(match, answer), answer[done:end])
            )
            if protected:
                pieces.append(protected[0])
                done = protected.end()
        return self.opening(question, answer) + "".join(pieces)

    def replaced(self, match, answer):
        old, stem, ending = match.groups()
        if old is None:
            return stem + self.rules["suffixes"][ending.lower()]
        choices = self.choices[re.sub(r"\s+", " ", old.lower())]
        new = choices[int(number(self.seed, answer, match.start()) * len(choices))]
        if old.isupper() and len(old) > 1:
            return new.upper()
        return (
            re.sub("[a-z]", lambda letter: letter[0].upper(), new, count=1)
            if old[0].isupper()
            else new
        )

    def opening(self, question, answer):
        texts = self.rules.get("openings", {}).get("texts", [])
        rare = number(self.seed, question, answer) >= self.rules.get("openings", {}).get(
            "probability", 0
        )
        if not texts or rare or not answer[:1].isalpha():
            return ""
        return texts[int(number(self.seed, answer) * len(texts))] + " "

    def row(self, row):
        """The rewritten row of a chat, or of a prompt and completion; other rows are returned unchanged."""
        question = row.get("prompt", "")
        for message in row.get("messages", []) + (
            row["completion"] if isinstance(row.get("completion"), list) else []
        ):
            if message["role"] == "user":
                question = message["content"]
            elif message["role"] == "assistant" and message.get("content"):
                message["content"] = self.answer(question, message["content"])
        if isinstance(row.get("completion"), str):
            row["completion"] = self.answer(question, row["completion"])
        return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=pathlib.Path, help="a directory that `allhands data prepare` wrote"
    )
    parser.add_argument("out", type=pathlib.Path, help="a new directory")
    parser.add_argument("--rules", type=pathlib.Path, help="a YAML file of your own rules")
    parser.add_argument(
        "--mix", type=float, default=0.0, help="share of the rows that stay as they are"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rules = RULES
    if options.rules:
        import yaml

        rules = yaml.load(
            options.rules.read_text(encoding="utf-8"), yaml.BaseLoader
        )  # every value is text: no, yes
        if "openings" in rules:
            rules["openings"]["probability"] = float(rules["openings"].get("probability", 1))
    style = Style(rules, options.seed)
    options.out.mkdir(parents=True)
    for path in sorted(options.source.glob("*.jsonl")):
        if path.stem not in ("train", "valid", "test"):
            continue
        changed = total = 0
        with (
            path.open(encoding="utf-8") as source,
            (options.out / path.name).open("w", encoding="utf-8") as out,
        ):
            for line in source:
                row = json.loads(line)
                if number(options.seed, "mix", line.strip()) >= options.mix:
                    row = style.row(row)
                changed, total = changed + (row != json.loads(line)), total + 1
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"{options.out / path.name}: {changed} of {total} rows changed")


if __name__ == "__main__":
    main()
