"""Generated pages are those of the code."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_configuration_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "write_configuration_docs.py"))["page"]()
    assert (ROOT / "docs" / "configuration.md").read_text() == page, (
        "run scripts/write_configuration_docs.py"
    )
