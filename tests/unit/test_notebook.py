"""In a notebook the progress of a run is one output that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from allhands.io.notebook import NotebookOutput, in_notebook
from allhands.observe.metrics.console import ConsoleSink
from allhands.observe.metrics.events import Warned

RUN = """
import allhands
result = allhands.finetune(
    model={model!r}, data={data!r}, adapter_path={run!r}, iters=30, steps_per_report=1,
    steps_per_eval=10, save_every=10, batch_size=2, val_batches=1, num_layers=1, profile=True,
)
"""
ERROR = """
try:
    allhands.finetune(learning_rate=-1)
except allhands.AllhandsError as error:
    print(error)
"""


def executed(*cells: str) -> list[list[Any]]:
    """The outputs of each cell, by a kernel of its own."""
    notebook: Any = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
def test_thirty_reports_are_one_output(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    source = RUN.format(model=str(tiny_model), data=str(tiny_data), run=str(tmp_path / "run"))
    progress, error = executed(source, ERROR)
    # tqdm, which others import, asks for ipywidgets.
    own = [output for output in progress if "tqdm" not in output.get("text", "")]
    assert [output.output_type for output in own] == ["display_data"], own
    text, html = own[0].data["text/plain"], own[0].data["text/html"]
    assert text.count("step 30/30") == 1
    assert "step 29/30" not in text
    assert "finished at step 30" in text
    assert '<progress value="30" max="30"' in html
    assert len(text.splitlines()) < 25
    assert (tmp_path / "run" / "adapters.safetensors").exists()
    (printed,) = error
    assert printed.text.startswith("learning_rate=: ")


def test_this_process_is_no_notebook() -> None:
    assert not in_notebook()


def test_warnings_stay_and_html_is_escaped() -> None:
    shown = Mock()
    page = NotebookOutput(lambda line: line.replace("--iters", "iters"), shown)
    sink = ConsoleSink(Console(file=page))  # type: ignore[arg-type]
    for number in range(9):
        sink.emit(Warned(0, f"<b>{number}</b> --iters"))
        page.add_event(f"event {number} --iters")
    bundle = page._repr_mimebundle_()
    assert bundle["text/plain"].count("<b>") == 9
    assert bundle["text/plain"].count("event") == 5
    assert "--" not in bundle["text/plain"]
    assert "<b>" not in bundle["text/html"]
    shown.assert_called_once()  # one output, that is updated
    assert shown.return_value.update.call_count == 17
