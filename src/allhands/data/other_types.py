"""Files that people have and that are not read here, each with the commands that make one of it that is."""

from __future__ import annotations

import shlex
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

# What reads a table, beside pandas; pandas looks at the contents, not at the name.
_TABLES = {".xlsx": "openpyxl", ".xlsm": "openpyxl", ".xlsb": "pyxlsb", ".xls": "xlrd", ".ods": "odfpy"}
_DOCUMENTS = {".docx": "docx", ".odt": "odt", ".epub": "epub", ".html": "html", ".htm": "html", ".rtf": "rtf"}
# Of an archive of a document, the member that only its kind has.
_MEMBERS = {"xl/workbook.xml": ".xlsx", "xl/workbook.bin": ".xlsb", "word/document.xml": ".docx"}
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
    name = suffix or path.suffix.lower()
    ways: dict[str, Callable[[Path, str], str]] = {
        **dict.fromkeys(_TABLES, _table),
        **dict.fromkeys((*_DOCUMENTS, ".tex"), _document),
        **{".pdf": _pdf, ".doc": _old_document},
        **dict.fromkeys((".zip", ".tar", ".tgz"), _archive),
        **dict.fromkeys((".7z", ".rar"), _packed),
        **dict.fromkeys((".yaml", ".yml"), _yaml),
        **dict.fromkeys((".pkl", ".pickle"), _pickle),
        **dict.fromkeys((".db", ".sqlite", ".sqlite3"), _database),
        **dict.fromkeys((".orc",), _orc),
        **dict.fromkeys((".avro", ".h5", ".hdf5", ".tfrecord"), _library),
    }
    return ways[name](path, name) if name in ways else None


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
            if found := next((kind for member, kind in _MEMBERS.items() if member in names), None):
                return found
            if "mimetype" in names:
                told = archive.read("mimetype")[:80]
                kinds = {b"opendocument.spreadsheet": ".ods", b"opendocument.text": ".odt", b"epub": ".epub"}
                return next((kind for words, kind in kinds.items() if words in told), None)
    return None


def _python(code: str, *arguments: Path) -> str:
    """A call of Python, whose arguments are file names."""
    return f'python -c "{code}" {shlex.join(map(str, arguments))}'


def _new(path: Path, suffix: str) -> Path:
    """What is made of a file; never the file itself."""
    made = path.with_suffix(suffix)
    return made if made != path else path.with_name(f"{path.stem}-new{suffix}")


def _then(path: Path) -> str:
    return f", then: allhands data prepare {shlex.quote(str(path))} --out DIR"


def _table(path: Path, suffix: str) -> str:
    made = _new(path, ".csv")
    code = "import pandas, sys; pandas.read_excel(sys.argv[1]).to_csv(sys.argv[2], index=False)"
    return f"write it as CSV: pip install pandas {_TABLES[suffix]} && {_python(code, path, made)}{_then(made)}"


def _document(path: Path, suffix: str) -> str:
    made = _new(path, ".txt")
    kind = _DOCUMENTS.get(suffix, "latex")
    code = (
        "import pypandoc, sys; pypandoc.convert_file(sys.argv[1], 'plain', "
        f"format='{kind}', extra_args=['--wrap=none'], outputfile=sys.argv[2])"
    )
    return f"write its text out: pip install pypandoc-binary && {_python(code, path, made)}{_then(made)}"


def _old_document(path: Path, _suffix: str) -> str:
    made = _new(path, ".txt")
    folder = shlex.quote(str(path.parent))
    command = f"soffice --headless --convert-to txt:Text --outdir {folder} {shlex.quote(str(path))}"
    return f"write its text out with LibreOffice: {command}{_then(made)}"


def _pdf(path: Path, _suffix: str) -> str:
    made = _new(path, ".txt")
    code = (
        "import pypdf, sys; open(sys.argv[2], 'w', encoding='utf-8')"
        ".writelines(page.extract_text() + chr(10) * 2 for page in pypdf.PdfReader(sys.argv[1]).pages)"
    )
    return f"write its text out: pip install pypdf && {_python(code, path, made)}{_then(made)}"


def _archive(path: Path, suffix: str) -> str:
    made = path.with_name(path.name.partition(".")[0] or "unpacked")
    module = "zipfile" if suffix == ".zip" else "tarfile"
    return f"unpack it: python -m {module} -e {shlex.join([str(path), str(made)])}{_then(made)}"


def _packed(_path: Path, _suffix: str) -> str:
    return "unpack it, and name the files that were in it"


def _yaml(path: Path, _suffix: str) -> str:
    made = _new(path, ".json")
    code = (
        "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1], encoding='utf-8')), "
        "open(sys.argv[2], 'w'), default=str)"
    )
    return f"write it as JSON: pip install pyyaml && {_python(code, path, made)}{_then(made)}"


def _pickle(path: Path, _suffix: str) -> str:
    made = _new(path, ".jsonl")
    code = "import pandas, sys; pandas.read_pickle(sys.argv[1]).to_json(sys.argv[2], orient='records', lines=True)"
    told = "a pickle may run code when it is read: where you trust it, write it out: pip install pandas"
    return f"{told} && {_python(code, path, made)}{_then(made)}"


def _database(path: Path, _suffix: str) -> str:
    made = shlex.quote(str(_new(path, ".csv")))
    return (
        f"write the table as CSV: sqlite3 -header -csv {shlex.quote(str(path))} 'SELECT * FROM TABLE' > {made} "
        f"(sqlite3 {shlex.quote(str(path))} .tables lists them), then: allhands data prepare {made} --out DIR"
    )


def _orc(path: Path, _suffix: str) -> str:
    made = _new(path, ".parquet")
    code = "import pandas, sys; pandas.read_orc(sys.argv[1]).to_parquet(sys.argv[2])"
    return f"write it as Parquet: pip install pandas pyarrow && {_python(code, path, made)}{_then(made)}"


def _library(_path: Path, _suffix: str) -> str:
    return "write it as Parquet with the library that it is from"
