"""Files that people have and that are not read here, each with the commands that make one of it that is."""

from __future__ import annotations

import shlex
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO

# The package with which pandas reads a table, and the name that pandoc has for a document.
_READERS = {".xlsx": "openpyxl", ".xlsm": "openpyxl", ".xlsb": "pyxlsb", ".xls": "xlrd", ".ods": "odfpy"}
_DOCUMENTS = {f".{kind}": kind for kind in ("docx", "odt", "epub", "html", "rtf")} | {".htm": "html", ".tex": "latex"}
_EXCEL = "import pandas, sys; pandas.read_excel(sys.argv[1]).to_csv(sys.argv[2], index=False)"
_PANDOC = (
    "import pypandoc, sys; pypandoc.convert_file(sys.argv[1], 'plain', "
    "format='{kind}', extra_args=['--wrap=none'], outputfile=sys.argv[2])"
)
_PDF = (
    "import pypdf, sys; open(sys.argv[2], 'w', encoding='utf-8')"
    ".writelines(page.extract_text() + chr(10) * 2 for page in pypdf.PdfReader(sys.argv[1]).pages)"
)
_YAML = (
    "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1], encoding='utf-8')), "
    "open(sys.argv[2], 'w'), default=str)"
)
_ORC = "import pandas, sys; pandas.read_orc(sys.argv[1]).to_parquet(sys.argv[2])"
_PICKLE = "import pandas, sys; pandas.read_pickle(sys.argv[1]).to_json(sys.argv[2], orient='records', lines=True)"
_TRUSTED = "a pickle may run code when it is read: where you trust it, write it out"
# For each type: the form it is converted to, the packages and the Python code that convert it, and the new ending.
_BY_PYTHON = {
    **{suffix: ("write it as CSV", f"pandas {reader}", _EXCEL, ".csv") for suffix, reader in _READERS.items()},
    **{
        suffix: ("write its text out", "pypandoc-binary", _PANDOC.format(kind=kind), ".txt")
        for suffix, kind in _DOCUMENTS.items()
    },
    ".pdf": ("write its text out", "pypdf", _PDF, ".txt"),
    **dict.fromkeys((".yaml", ".yml"), ("write it as JSON", "pyyaml", _YAML, ".json")),
    **dict.fromkeys((".pkl", ".pickle"), (_TRUSTED, "pandas", _PICKLE, ".jsonl")),
    ".orc": ("write it as Parquet", "pandas pyarrow", _ORC, ".parquet"),
}
_SQLITE = (
    "write the table as CSV: sqlite3 -header -csv {path} 'SELECT * FROM TABLE' > {made} "
    "(sqlite3 {path} .tables lists them)"
)
_OFFICE = "write its text out with LibreOffice: soffice --headless --convert-to txt:Text --outdir {folder} {path}"
# Other commands, and the ending of what they make; None if they make no file that is known.
_BY_COMMAND: dict[str, tuple[str, str | None]] = {
    ".doc": (_OFFICE, ".txt"),
    ".zip": ("unpack it: python -m zipfile -e {path} {made}", ""),
    **dict.fromkeys((".tar", ".tgz"), ("unpack it: python -m tarfile -e {path} {made}", "")),
    **dict.fromkeys((".7z", ".rar"), ("unpack it, and name the files that were in it", None)),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), (_SQLITE, ".csv")),
    **dict.fromkeys(
        (".avro", ".h5", ".hdf5", ".tfrecord"), ("write it as Parquet with the library that it is from", None)
    ),
}
# Documents that are archives are told apart by a member that only their kind has, or by the text of "mimetype".
_MEMBERS = {"xl/workbook.xml": ".xlsx", "xl/workbook.bin": ".xlsb", "word/document.xml": ".docx"}
_MIME_TYPES = {b"opendocument.spreadsheet": ".ods", b"opendocument.text": ".odt", b"epub": ".epub"}
_NAMES = {
    **{".xlsx": "a spreadsheet (.xlsx)", ".xlsb": "a spreadsheet (.xlsb)", ".ods": "a spreadsheet (.ods)"},
    **{".docx": "a document (.docx)", ".odt": "a document (.odt)", ".epub": "a book (.epub)"},
    **{".pdf": "a PDF document", ".xls": "an old spreadsheet (.xls) or document (.doc)"},
}


def way_from(path: Path, suffix: str | None = None) -> str | None:
    """What to do about a file; ``None`` where that is not known. Commands hold its own name, and work as they stand.

    Args:
        suffix: what the file is, if its name does not say so.
    """
    suffix = suffix or path.suffix.lower()
    if suffix in _BY_PYTHON:
        told, packages, code, ending = _BY_PYTHON[suffix]
        way = f'{told}: pip install {packages} && python -c "{code}" {{path}} {{made}}'
    elif suffix in _BY_COMMAND:
        way, ending = _BY_COMMAND[suffix]
    else:
        return None
    if ending is None:
        return way
    made = path.with_suffix(ending) if ending else path.with_name(path.name.partition(".")[0] or "unpacked")
    made = made if made != path else path.with_name(f"{path.stem}-new{ending}")
    names = {"{path}": path, "{made}": made, "{folder}": path.parent}
    for name, value in names.items():
        way = way.replace(name, shlex.quote(str(value)))
    return f"{way}, then: allhands data prepare {shlex.quote(str(made))} --out DIR"


def true_kind(path: Path, file: IO[bytes]) -> tuple[str, str] | None:
    """What a document is that has another type's name, and what to do about it; the file is read from its beginning."""
    suffix = _suffix_of(file)
    way = way_from(path, suffix) if suffix else None
    return None if suffix is None or way is None else (_NAMES[suffix], way)


def _suffix_of(file: IO[bytes]) -> str | None:
    with suppress(OSError, zipfile.BadZipFile, ValueError):
        file.seek(0)
        head = file.read(8)
        if head.startswith(b"%PDF-"):
            return ".pdf"
        if head.startswith(b"\xd0\xcf\x11\xe0"):
            return ".xls"
        with zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            told = archive.read("mimetype")[:80] if "mimetype" in names else b""
            found = [kind for member, kind in _MEMBERS.items() if member in names]
            return next(iter([*found, *(kind for words, kind in _MIME_TYPES.items() if words in told)]), None)
    return None
