"""Loss pictures and time tables, from histories with known numbers."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from allhands.errors import ConfigError, DataError, StorageError
from allhands.io.formatting import format_mark
from allhands.observe.charts import smooth
from allhands.observe.metrics import (
    RunEnded,
    RunHistory,
    RunStarted,
    StepSkipped,
    TrainReport,
    ValidReport,
)
from allhands.observe.plots import plot_losses
from allhands.observe.times import times_markdown, times_table


def history(
    name: str = "run", ranks: int = 1, step_s: float = 2.0, num_points: int = 30
) -> RunHistory:
    """Loss 4 / (1 + step / 10) a step; validation every ten, 0.5 above it, lowest at the third."""
    started = RunStarted(
        name,
        "tiny",
        "lora",
        ranks,
        "ring" if ranks > 1 else "none",
        8,
        num_points,
        10,
        100,
        240,
        2,
        {},
        0.0,
    )
    run = RunHistory(name, started)
    for step in range(1, num_points + 1):
        memory = tuple(600_000_000 + 10_000_000 * rank for rank in range(ranks))
        speed = 100 / step_s if step > 1 else 1.0  # the first report includes the warm-up
        report = TrainReport(
            step,
            4 / (1 + step / 10),
            1e-4,
            0.5,
            speed,
            speed / 2,
            50 * step,
            step_s,
            0.0,
            0.0,
            0.0,
            memory,
            0.1,
        )
        run.train.append(replace(report, elapsed_s=step * step_s))
    for step, loss in ((10, 2.5), (20, 1.8), (30, 2.0)):
        if step <= num_points:
            run.valid.append(ValidReport(step, loss, 90, step * step_s, 1.0, True))
    run.ended = RunEnded(num_points, "finished", num_points * step_s + 5)
    return run


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, for a look at their lines and texts."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *arguments: object, **options: object) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def lines(figure: Figure, panel: int, style: str) -> list[np.ndarray]:
    """The data of the lines of one style: "-" training as reported then smoothed, "--" validation."""
    found = [line for line in figure.axes[panel].lines if line.get_linestyle() == style]
    found.sort(key=lambda line: line.get_alpha() is None)
    return [np.asarray(line.get_xydata()) for line in found if line.get_marker() != "*"]


def test_the_panels_show_loss_over_steps_and_over_time(tmp_path: Path, drawn: list[Figure]) -> None:
    run = history(step_s=20.0)
    assert plot_losses([run], tmp_path / "loss.png", title="A title") == tmp_path / "loss.png"
    assert png_size(tmp_path / "loss.png") == (1200, 600)
    (figure,) = drawn
    losses = [report.loss for report in run.train]
    np.testing.assert_allclose(
        lines(figure, 0, "-")[0], np.column_stack([np.arange(1, 31), losses])
    )
    minutes = np.arange(1, 31) * 20 / 60
    np.testing.assert_allclose(lines(figure, 1, "-")[0], np.column_stack([minutes, losses]))
    np.testing.assert_allclose(lines(figure, 0, "--")[0], [[10, 2.5], [20, 1.8], [30, 2.0]])
    assert figure.axes[1].get_xlabel() == "training time (minutes)"
    assert figure.axes[0].get_ylabel() == "loss per token (lower is better)"
    assert figure.get_suptitle() == "A title"


def test_the_best_validation_is_starred_and_named(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_losses([history()], tmp_path / "one.png")
    plot_losses([history("a"), history("b", ranks=2)], tmp_path / "two.png")
    for figure in drawn:
        stars = [line for line in figure.axes[0].lines if line.get_marker() == "*"]
        for star in stars:
            np.testing.assert_allclose(np.asarray(star.get_xydata()), [[20, 1.8]])
        assert len(stars) == len(figure.legends[0].get_texts())
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "run (1 rank): best validation 1.800"
    ]
    labels = [text.get_text() for text in drawn[1].legends[0].get_texts()]
    assert labels == ["a (1 rank): best validation 1.800", "b (2 ranks): best validation 1.800"]


RESTARTS = [(6, 12.0), (15, 30.0), (15, 30.0), (28, 56.0)]


def marks(figure: Figure, panel: int) -> tuple[list[float], list[float]]:
    """Where restarts are drawn, and where skipped steps."""
    dotted = [line for line in figure.axes[panel].lines if line.get_linestyle() == ":"]
    crosses = [line for line in figure.axes[panel].lines if line.get_marker() == "x"]
    for line in dotted:
        assert line.get_zorder() < min(
            other.get_zorder() for other in figure.axes[panel].lines if other not in dotted
        )
    return [float(line.get_xdata()[0]) for line in dotted], [
        float(x) for line in crosses for x in line.get_xdata()
    ]


def test_a_name_that_the_font_cannot_write_is_no_warning(tmp_path: Path) -> None:
    plot_losses([history("漢字")], tmp_path / "loss.png")  # warnings are errors here
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_restarts_and_skipped_steps_are_marked_on_both_panels(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    run = history()
    run.restarts = RESTARTS
    run.skipped = [
        StepSkipped(7, "the gradient is nan", (3,)),
        StepSkipped(12, "the gradient is nan", (4,)),
    ]
    run.train = [
        report for report in run.train if report.step % 2 == 0
    ]  # step 7 lies between two reports
    plot_losses([run], tmp_path / "a.png")
    assert marks(drawn[0], 0) == ([6.0, 15.0, 28.0], [7.0, 12.0])
    assert marks(drawn[0], 1) == ([12.0, 30.0, 56.0], [14.0, 24.0])
    legend = drawn[0].axes[1].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert (labels.count("restart"), labels.count("skipped step")) == (1, 1)


def test_a_run_without_restarts_has_no_mark_and_no_word_of_them(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    plot_losses([history()], tmp_path / "a.png")
    assert marks(drawn[0], 0) == marks(drawn[0], 1) == ([], [])
    legend = drawn[0].axes[1].get_legend()
    assert legend is not None
    words = [
        text.get_text() for axes in drawn[0].axes for text in (*axes.texts, *legend.get_texts())
    ]
    assert not {"restart", "skipped step"} & set(words)


def test_restarts_have_the_colour_of_their_run(tmp_path: Path, drawn: list[Figure]) -> None:
    runs = [history("a"), history("b")]
    runs[0].restarts, runs[1].restarts = [(5, 10.0)], [(9, 18.0)]
    plot_losses(runs, tmp_path / "a.png")
    solid = {line.get_color() for line in drawn[0].axes[0].lines if line.get_linestyle() == "-"}
    dotted = [line.get_color() for line in drawn[0].axes[0].lines if line.get_linestyle() == ":"]
    assert set(dotted) == solid
    assert len(solid) == 2


@pytest.mark.slow
def test_nothing_is_cut_off_and_no_label_lies_on_another(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    runs = [history("x" * 80, ranks=ranks) for ranks in range(1, 6)]
    plot_losses(runs, tmp_path / "a.png", title="word " * 40)
    (figure,) = drawn
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= 1200
    title = figure.texts[0].get_window_extent()
    assert title.y1 <= 600
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert legend.y1 <= box.y0
        assert box.y1 <= title.y0


@pytest.mark.parametrize("late", [0.5, 6.0, 3.0, 12.0])
def test_no_curve_is_hidden_by_the_legend_of_styles(
    late: float, tmp_path: Path, drawn: list[Figure]
) -> None:
    """Validation losses rise to ``late``, as where a model learns by heart."""
    run = history(num_points=30)
    run.valid[:] = [
        ValidReport(step, max(late * step / 30, 0.2), 90, step * 2.0, 1.0, best=False)
        for step in range(3, 31, 3)
    ]
    plot_losses([run], tmp_path / "a.png")
    panel = drawn[0].axes[1]
    legend = panel.get_legend()
    assert legend is not None
    box = legend.get_window_extent()
    curves = [line for line in panel.lines if line.get_linestyle() != ":"]
    for line in curves:
        points = panel.transData.transform(np.asarray(line.get_xydata(), dtype=np.float64))
        assert not any(box.contains(x, y) for x, y in points), legend.get_loc()


def test_validations_on_other_examples_are_another_line(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    run = history()
    assert run.started is not None
    starts = (replace(run.started, validated="a/9"), replace(run.started, step=20, validated="b/9"))
    plot_losses([replace(run, starts=list(starts))], tmp_path / "a.png")
    before, since = lines(drawn[0], 0, "--")
    np.testing.assert_allclose(before, [[10, 2.5]])
    np.testing.assert_allclose(since, [[20, 1.8], [30, 2.0]])


def test_identical_runs_stay_visible(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_losses([history("a"), history("b")], tmp_path / "a.png")
    solid = [line for line in drawn[0].axes[0].lines if line.get_linestyle() == "-"]
    first, second = (
        line for line in solid if line.get_alpha() is None and line.get_marker() != "*"
    )
    assert first.get_color() != second.get_color()
    assert (
        first.get_linewidth() >= second.get_linewidth() + 1.5
    )  # seen on both sides of the one above


@pytest.mark.parametrize("num_points", [1, 2, 30])
@pytest.mark.parametrize("with_valid", [True, False])
def test_short_runs_and_runs_without_validation(
    tmp_path: Path, num_points: int, with_valid: bool
) -> None:
    run = history(num_points=num_points)
    run.valid = run.valid if with_valid else []
    run.started = None
    assert png_size(plot_losses([run], tmp_path / "new" / "a")) == (1200, 600)


def test_a_single_point_has_a_marker(tmp_path: Path, drawn: list[Figure]) -> None:
    plot_losses([history(num_points=1)], tmp_path / "a.png")
    assert all(line.get_marker() not in ("", "None") for line in drawn[0].axes[0].lines)


def test_losses_that_are_not_finite_are_left_out(tmp_path: Path, drawn: list[Figure]) -> None:
    run = history()
    run.train[5:] = [replace(report, loss=float("nan")) for report in run.train[5:]]
    plot_losses([run], tmp_path / "a.png")
    assert np.isfinite(lines(drawn[0], 0, "-")[0][:, 1]).sum() == 5


def test_runs_without_a_loss_are_skipped_and_alone_a_data_error(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    empty = RunHistory("empty")
    plot_losses([empty, history()], tmp_path / "a.png")
    assert len(drawn[0].legends[0].get_texts()) == 1
    with pytest.raises(DataError) as caught:
        plot_losses([empty], tmp_path / "b.png")
    assert caught.value.code == "samples-missing"
    with pytest.raises(DataError):
        plot_losses([], tmp_path / "b.png")


def test_settings_of_the_caller_neither_count_nor_change(tmp_path: Path) -> None:
    plain = plot_losses([history()], tmp_path / "plain.png").read_bytes()
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "savefig.dpi": 50}):
        before = dict(matplotlib.rcParams)
        other = plot_losses([history()], tmp_path / "other.png").read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert other == plain


def test_pyplot_and_mlx_are_not_imported() -> None:
    code = "import sys, allhands.observe.plots; print([m for m in ('matplotlib.pyplot', 'mlx') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_picture_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.png"
    out.write_bytes(b"old")

    def full(self: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", full)
        with pytest.raises(StorageError) as caught:
            plot_losses([history()], out)
        assert caught.value.code == "disk-full"
    assert out.read_bytes() == b"old"
    plot_losses([history()], out)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_runs_own_picture_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        plot_losses([history()], tmp_path / "new" / "a.png", private=True)
        plot_losses([history()], tmp_path / "b.png")
    finally:
        os.umask(before)
    modes = {
        name: (tmp_path / name).stat().st_mode & 0o777 for name in ("new", "new/a.png", "b.png")
    }
    assert modes == {"new": 0o700, "new/a.png": 0o600, "b.png": 0o664}


def test_places_and_formats_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file: cannot be written: File exists"):
        plot_losses([history()], tmp_path / "file" / "a.png")
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(ConfigError, match=r"directory\.png: this is a directory"):
        plot_losses([history()], tmp_path / "directory.png")
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf"):
        plot_losses([history()], tmp_path / "a.jpeg2000")


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_other_formats(tmp_path: Path, suffix: str, start: bytes) -> None:
    assert plot_losses([history()], tmp_path / f"a.{suffix}").read_bytes().startswith(start)


def test_smoothing_is_the_mean_over_a_window_that_shrinks_at_the_start() -> None:
    values = np.random.default_rng(0).normal(size=60)
    expected = []
    for place in range(60):
        half = min(3, place)
        expected.append(values[place - half : place + half + 1].mean())
    np.testing.assert_allclose(smooth(values), expected, atol=1e-12)
    np.testing.assert_allclose(smooth(values[:19]), values[:19])
    assert smooth(np.array([])).shape == (0,)


def test_the_table_of_times() -> None:
    two = history("two", ranks=2, step_s=1.25)
    markdown = times_markdown([history("one | a"), two]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown]
    assert dict(zip(cells[0], cells[3], strict=True)) == {
        "run": "two (2 ranks)",
        "ranks": "2",
        "cores per rank": "2",
        "steps": "30",
        "training time": "42 s",
        "seconds per step": "1.25",
        "tokens/s": "80",
        "speed-up": "1.60x",
        "final training loss": "1.000",
        "best validation loss": "1.800",
        "peak memory per rank": "600 MB to 610 MB",
    }
    first = r"| one \| a (1 rank) | 1 | 2 | 30 | 1m05s | 2 | 50 | 1.00x | 1.000 | 1.800 | 600 MB |"
    assert markdown[2] == first


def test_the_table_says_what_is_unknown_or_unfinished() -> None:
    part = history("part")
    assert part.started is not None
    part.started, part.ended = replace(part.started, total_steps=100, cores_per_rank=None), None
    part.valid = []
    row = times_markdown([part]).splitlines()[2]
    assert (
        row == "| part (1 rank) | 1 | - | 30 of 100 | 1m00s | 2 | 50 | 1.00x | 1.000 | - | 600 MB |"
    )
    empty = times_markdown([RunHistory("empty"), part]).splitlines()
    assert empty[2] == "| empty | - | - | 0 | - | - | - | - | - | - | - |"
    assert times_markdown([]).count("\n") == 2


def test_the_rich_table_has_the_same_figures_and_takes_names_as_they_are() -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(times_table([history("[red]one"), history("same"), history("same")]))
    text = capture.get()
    for part in ("[red]one (1 rank)", "same (1 rank) #2", "1m05s", "1.00x", "600 MB"):
        assert part in text


def table_lines(runs: list[RunHistory], width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(times_table(runs))
    return capture.get().splitlines()


def test_long_names_keep_what_tells_them_apart_and_are_broken_between_words() -> None:
    rates = ("lr-1e-4", "lr-2e-4")
    lines = table_lines([history(f"qwen3-lora-rank-16-on-my-notes-{rate}") for rate in rates])
    for rate in rates:
        assert sum(rate in line.split("  ")[0] for line in lines) == 1


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("number", [1, 3, 4, 5, 12])
def test_the_table_of_any_number_of_runs_is_whole_in_80_columns(number: int, restarts: int) -> None:
    runs = [history(f"run {place} " + "x" * 30, ranks=1 + place) for place in range(number)]
    for place, run in enumerate(runs):
        run.restarts = [(5, 10.0)] * restarts
        # Figures as wide as they get.
        run.ended = RunEnded(10_000, "finished", 86_000.0 + place)
        run.train = [
            replace(report, tokens_per_s=123_456.0, step_time_s=0.00123) for report in run.train
        ]
        assert run.started is not None
        run.started = replace(run.started, total_steps=20_000, cores_per_rank=1 + place)
    lines = table_lines(runs)
    wide = table_lines(runs, width=400)
    assert max(map(len, lines)) <= 80
    # Every figure of the wide table can be read in the narrow one.
    for figure in ("23h53m", "0.00123", "123,456", "1.00x", "1.000", "1.800"):
        for text in ("\n".join(lines), "\n".join(wide)):
            assert text.count(figure) == number
    assert "\n".join(lines).count("20000") == number


def test_no_word_of_a_short_name_is_broken() -> None:
    runs = [history(f"p{place}", ranks=2) for place in range(4)]
    for place, run in enumerate(runs):
        run.restarts = [(5, 10.0)]
        assert run.started is not None
        run.started = replace(run.started, cores_per_rank=1 + place)
    told = "\n".join(table_lines(runs)).split()
    assert (told.count("(2"), told.count("ranks)"), told.count("restarts")) == (4, 4, 1)


def test_each_run_has_a_row(tmp_path: Path) -> None:
    runs = [
        history("one"),
        history("two", ranks=2, step_s=1.0),
        history("three"),
        history("four", ranks=3),
    ]
    heads, rows = table_lines(runs, 120)[1:4], table_lines(runs, 120)[4:-3]
    assert [row.split()[0] for row in rows if row.strip() and "─" not in row] == [
        "one",
        "two",
        "three",
        "four",
    ]
    two = next(row.split() for row in rows if "two" in row)
    assert two == [
        "two",
        "(2",
        "ranks)",
        "30",
        "35",
        "s",
        "1",
        "100",
        "2.00x",
        "1.000",
        "1.800",
        "610",
        "MB",
    ]
    assert "cores" not in " ".join(heads)  # they are the same
    assert "starts" not in " ".join(heads)


def test_a_run_that_went_on_with_other_ranks_names_all_numbers() -> None:
    run = history("part")
    assert run.started is not None
    run.starts = [replace(run.started, num_ranks=ranks) for ranks in (2, 1, 1, 3)]
    row = times_markdown([run]).splitlines()[2]
    assert row.startswith("| part (2, 1, 3 ranks) | 2, 1, 3 | ")


def test_restarts_are_counted_in_the_tables_only_if_there_are_any() -> None:
    runs = [history("one"), history("two")]
    assert not any("starts" in line for line in (*table_lines(runs), times_markdown(runs)))
    runs[1].restarts = RESTARTS
    lines = times_markdown(runs).splitlines()
    assert lines[0].endswith("| restarts |")
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["0", "4"]
    assert [row.split()[-1] for row in table_lines(runs, 120) if "rank)" in row] == ["0", "4"]


def test_marks_of_memory_have_all_their_digits() -> None:
    assert [format_mark(n) for n in (0, 2.5e6, 250e6, 1.25e9)] == [
        "0 MB",
        "2.5 MB",
        "250 MB",
        "1.25 GB",
    ]
