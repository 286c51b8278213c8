"""What ``benchmarks/gradients.py`` thinks of differences, and how it shows them. Nothing is
computed here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import architectures
import pytest
from benchmark_scripts import scripts_on_the_path

with scripts_on_the_path():
    import gradients
    import records
    from gradients_judge import BEYOND, REFUSED, Run, compared_with_judge, judge, pooled, unsteady
    from gradients_workers import Settings

LORA, AGAIN = Run("lora", False, "cpu"), Run("lora", True, "graph")
THEIRS = {"short": {"loss": 5.0}, "long": {"loss": 6.0}}


def batch(
    loss: float, whole: float | None = 1e-6, worst: float = 1e-6, **more: Any
) -> dict[str, Any]:
    return {
        "loss": loss,
        "whole": whole,
        "worst": worst,
        "array": "a",
        "left": [],
        "added": [],
        **more,
    }


def ours(**changed: Any) -> dict[str, Any]:
    return {"short": batch(5.0), "long": batch(6.0), "short again": batch(5.0), **changed}


def verdict(found: dict[str, Any], theirs: Any = THEIRS, run: Run = LORA, **more: Any) -> Any:
    return judge("llama", run, theirs, found, more.get("dtype", "float32"), more.get("refused", {}))


def test_small_differences_are_right() -> None:
    assert verdict(ours()).kind == "right"
    assert verdict(ours(long=batch(6.0, whole=3e-5, worst=5e-4))).is_good


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"long": batch(6.0, whole=2e-4)}, "long: gradient differs by 0.0002"),
        ({"short again": batch(5.0, worst=0.01)}, "short again: a differs by 0.01"),
        ({"short": batch(5.001)}, "short: loss 5.001 for 5"),
        ({"long": batch(6.0, whole=None)}, "long: not finite"),
        ({"long": batch(6.0) | {"left": ["b"]}}, "['b']"),
    ],
)
def test_each_batch_counts_as_a_whole_and_in_each_array(changed: dict[str, Any], text: str) -> None:
    found = verdict(ours(**changed))
    assert (found.kind, found.is_good) == ("wrong", False)
    assert text in found.text


def test_what_is_wrong_only_once_is_told_apart_and_is_not_right() -> None:
    right, wrong = verdict(ours()), verdict(ours(short=batch(5.1)))
    assert unsteady(wrong, [wrong, wrong]) == wrong
    found = unsteady(wrong, [right, wrong, right])
    assert (found.kind, found.is_good) == ("unsteady", False)
    assert "2 of 3" in found.text
    assert wrong.text in found.text
    assert unsteady(right, []) == right


@pytest.mark.parametrize(
    ("whose", "kind"),
    [(["ours"], "wrong"), (["mlx_lm's"], BEYOND), (["mlx_lm's", "ours"], BEYOND), ([], "wrong")],
)
def test_it_is_told_whose_gradient_is_not_finite(whose: list[str], kind: str) -> None:
    assert verdict(ours(long=batch(6.0, whole=None, **{"not finite": whose}))).kind == kind


def test_what_is_refused_in_one_form_is_known() -> None:
    told = {"refused": {"graph": "--compile"}, "run": Run("lora", False, "graph")}
    assert verdict({"refused": "--compile: cannot be"}, **told).kind == REFUSED
    assert verdict({"refused": "--compile: cannot be"}, **{**told, "run": LORA}).kind == "refused"


def test_a_batch_that_was_not_computed_is_missed() -> None:
    found = ours()
    del found["short again"]
    assert verdict(found).kind == "wrong"


def test_half_precision_may_be_as_far_from_float32_as_twice_mlx_lms() -> None:
    far = {"theirs from judge": 0.2, "judge loss": 6.0}
    assert (
        verdict(
            ours(long=batch(6.0, 0.3, **far, **{"ours from judge": 0.3})), dtype="bfloat16"
        ).kind
        == "right"
    )
    assert (
        verdict(
            ours(long=batch(6.0, 0.3, **far, **{"ours from judge": 0.5})), dtype="bfloat16"
        ).kind
        == "wrong"
    )
    # Where mlx_lm itself is wrong ours may be right.
    wrong = {"theirs from judge": 0.7, "judge loss": 6.0, "ours from judge": 0.01}
    found = verdict(ours(long=batch(6.0, 0.7, **wrong)), dtype="bfloat16")
    assert (found.kind, found.from_judge) == ("right", (0.7, 0.01))


def test_what_mlx_lm_cannot_compute_is_refused_in_words() -> None:
    cannot = {"error": "ValueError: no"}
    assert verdict({"refused": "not with this model"}, cannot).kind == BEYOND
    assert not verdict({"traceback": "ValueError: no"}, cannot).is_good
    assert not verdict({"refused": "not with this model"}).is_good
    assert not verdict({"died": "exit code -11"}).is_good


def test_a_refusal_that_is_known_is_good() -> None:
    known = {"+": "--grad-checkpoint"}
    refused = {"refused": "--grad-checkpoint: it has no effect"}
    assert verdict(refused, run=AGAIN, refused=known).kind == REFUSED
    assert not verdict(refused, refused=known).is_good
    assert not verdict({"refused": "--data: none"}, run=AGAIN, refused=known).is_good


def test_the_table_shows_the_largest_and_what_is_wrong() -> None:
    verdicts = [
        verdict(ours()),
        verdict(ours(long=batch(6.0, 0.5)), run=Run("lora", False, "graph")),
    ]
    verdicts.append(verdict({"traceback": "TypeError: x (a.py:1)"}, run=AGAIN))
    lines = gradients.table(verdicts).splitlines()
    assert lines[0] == "| | lora | lora+ |"
    assert lines[2] == "| llama | **5e-01** graph | traceback |"
    rows = gradients.rows(verdicts, {})
    assert [(row.name, row.median) for row in rows if row.better == "higher"] == [
        ("lora cpu: right", 1),
        ("lora graph: right", 0),
        ("lora+ graph: right", 0),
    ]
    record = records.make_record(
        "gradients", {"date": "2026-01-01", "commit": "c", "machine": {}}, rows
    )
    assert records.rows_in(record)


def test_variants_are_trained_in_a_few_ways(tmp_path: Path) -> None:
    runs = Settings(tmp_path).runs("llama")
    assert len(runs) == 20
    assert len(Settings(tmp_path).runs("llama~dynamic")) == 6
    assert len(Settings(tmp_path, ways=("dora",), forms=("graph",)).runs("llama")) == 1
    # TF32 would round float32 to ten bits.
    assert Settings(tmp_path).environ()["MLX_ENABLE_TF32"] == "0"
    assert "MLX_ENABLE_TF32" not in Settings(tmp_path, dtype="bfloat16").environ()


def test_configurations_are_found_by_name() -> None:
    wrapped = architectures.architecture("gemma3").config["text_config"]
    assert wrapped["model_type"] == "gemma3_text"
    assert architectures.named(["llama4"]) == ["llama4"]
    assert "llama~dynamic" in architectures.named(["llama"])
    with pytest.raises(ValueError, match="nothing"):
        architectures.named(["nothing"])
    assert gradients.main(["--only", "nothing"]) == 2


def drawn(theirs: float, ours_: float, **changed: Any) -> Any:
    """A verdict on one draw of the weights, so far from float32."""
    each = {"theirs from judge": theirs, "ours from judge": ours_}
    found = {name: batch(5.0, 0.3, **each) for name in ("short", "short again")}
    return verdict(found | {"long": batch(6.0, 0.3, **each)} | changed, dtype="bfloat16")


def test_where_rounding_decides_the_median_of_several_draws_is_compared() -> None:
    unlucky = drawn(0.05, 0.4)
    assert (unlucky.kind, unlucky.by_rounding) == ("wrong", True)
    assert (
        pooled([unlucky, drawn(0.2, 0.1), drawn(0.1, 0.12), drawn(0.08, 0.08)], "bfloat16").kind
        == "right"
    )
    # One that is always worse is wrong, however unlucky mlx_lm is once.
    assert (
        pooled([unlucky, drawn(0.9, 0.5), drawn(0.1, 0.35), drawn(0.08, 0.3)], "bfloat16").kind
        == "wrong"
    )


def test_what_no_rounding_explains_is_wrong_in_any_draw() -> None:
    lucky = drawn(0.1, 0.1)
    for bad in (
        {"short": batch(5.0) | {"left": ["b"]}},
        {"short": batch(7.0)},
        {"short": batch(5.0, None)},
    ):
        assert (
            pooled([drawn(0.05, 0.4), lucky, lucky, drawn(0.1, 0.1, **bad)], "bfloat16").kind
            == "wrong"
        )
    # Too few draws say nothing.
    assert pooled([drawn(0.05, 0.4), lucky], "bfloat16").kind == "wrong"


def test_over_all_comparisons_the_mean_share_is_told() -> None:
    assert "2.00 times" in compared_with_judge(
        [drawn(0.1, 0.2), drawn(0.02, 0.04), drawn(0.01, 0.02)]
    )
    assert compared_with_judge([verdict(ours())]) == ""
