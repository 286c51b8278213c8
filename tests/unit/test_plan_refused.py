"""What plans refuse: trainings that training refuses, in the same words; computers, links and
prices that cannot be.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from command_line import call_allhands
from tiny import in_files, write_model

from allhands.errors import ConfigError
from allhands.model.reading import list_of_files
from allhands.model.weight_files import LIST_FILE, present
from allhands.plan.devices import device_of
from allhands.plan.links import link_of
from allhands.runtime.accelerator import detect

DEVICE = ("plan", "--device", "M1 Pro", "--iters", "9")


def test_a_training_that_is_refused_is_not_planned(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    values = json.loads((tiny_model / "config.json").read_text())
    values["quantization"] = {"group_size": 64, "bits": 4}
    (quantised / "config.json").write_text(json.dumps(values))
    for words in (DEVICE, ("plan", "--data", str(tiny_data))):  # before anything is trained here
        full = call_allhands(
            *words, "--model", str(quantised), "--fine-tune-type", "full", cwd=tmp_path
        )
        assert (full.returncode, full.stdout) == (2, "")
        assert (
            "the model is quantised (4 bits): its weights cannot be trained in full" in full.stderr
        )
        assert "what to do: use --fine-tune-type lora, or dequantise" in full.stderr
    many = call_allhands(*DEVICE, "--model", str(tiny_model), "--num-layers", "4", cwd=tmp_path)
    assert (many.returncode, many.stdout) == (2, "")
    assert "4 layers asked for, but the model has 3" in many.stderr
    keys = json.dumps({"keys": ["attn.q", "no.such"], "rank": 8, "scale": 20.0, "dropout": 0.0})
    none = call_allhands(
        *DEVICE, "--model", str(tiny_model), "--lora-parameters", keys, cwd=tmp_path
    )
    assert (none.returncode, none.stdout) == (2, "")
    assert "--lora-parameters" in none.stderr
    assert "attn.q, no.such" in none.stderr
    assert "linear layers of a block: self_attn.q_proj, " in none.stderr


@pytest.mark.skipif(detect().kind != "cpu", reason="a GPU can divide the optimizer's state")
def test_a_strategy_that_training_refuses_is_not_planned(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    words = ("--model", str(tiny_model), "--data", str(tiny_data), "-n", "2", "--strategy", "zero1")
    plan = call_allhands("plan", *words, "--iters", "3", cwd=tmp_path)
    assert (plan.returncode, plan.stdout) == (2, "")
    assert "--compile on" in plan.stderr


@pytest.mark.parametrize(
    ("more", "code", "told"),
    [
        (("--resume-adapter-file", "none/adapters.safetensors"), 4, "none/adapters.safetensors"),
        (("--warmup-steps", "9"), 2, "--warmup-steps"),
        (("--warmup-steps", "8"), 0, ""),
        (("-c", "schedule.yaml"), 2, "--lr-schedule"),
    ],
)
def test_files_and_schedules_that_training_refuses_are_not_planned(
    tmp_path: Path, tiny_model: Path, more: tuple[str, ...], code: int, told: str
) -> None:
    schedule = {"name": "cosine_decay", "arguments": [1e-5]}
    (tmp_path / "schedule.yaml").write_text(json.dumps({"lr_schedule": schedule}))
    done = call_allhands(*DEVICE, "--model", str(tiny_model), *more, cwd=tmp_path)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr


def test_a_directory_that_is_no_model_is_told_as_training_tells_it(
    tmp_path: Path, tiny_data: Path
) -> None:
    done = call_allhands(*DEVICE, "--model", str(tiny_data), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "")
    assert "no config.json: this is not a model directory" in done.stderr
    assert (
        "what to do: give the directory that holds config.json, model*.safetensors" in done.stderr
    )


def test_options_that_are_not_planned_are_named(tmp_path: Path, tiny_model: Path) -> None:
    words = (*DEVICE, "--machines", "3", "--model", str(tiny_model), "--strategy", "pipeline")
    assert "--pp-schedule" not in call_allhands(*words, cwd=tmp_path).stdout
    done = call_allhands(*words, "--pp-schedule", "zb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--pp-schedule zb" in done.stdout


def test_weights_that_are_elsewhere_count(tmp_path: Path, tiny_data: Path) -> None:
    """This computer has the files of its own stages alone: ``cluster sync --stages`` has listed the
    others.
    """
    model = in_files(write_model(tmp_path / "model"), [("layers.0.", "embed"), ("layers.", "norm")])
    words = (*DEVICE, "--model", str(model), "--data", str(tiny_data), "--json")
    whole = call_allhands(*words, cwd=tmp_path)
    files = list_of_files(present(model))
    (model / LIST_FILE).write_text(json.dumps({name: asdict(file) for name, file in files.items()}))
    (model / max(files)).unlink()
    some = call_allhands(*words, cwd=tmp_path)
    assert (whole.returncode, some.returncode) == (0, 0), some.stderr
    assert json.loads(some.stdout)["memory"] == json.loads(whole.stdout)["memory"]
    for file in model.glob("*.safetensors"):
        file.unlink()
    (model / LIST_FILE).unlink()
    assert call_allhands(*words, cwd=tmp_path).returncode == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("M1 Pro 0GB", "'M1 Pro 0GB' has no more memory than the system itself takes, 2 GB"),
        ("M1 Pro 2GB", "'M1 Pro 2GB' has no more memory than the system itself takes, 2 GB"),
        (
            "RTX 4090 0.5GB",
            "'RTX 4090 0.5GB' has no more memory than the system itself takes, 0.5 GB",
        ),
        (f"M1 Pro {'9' * 400}GB", "has more memory than there is"),
    ],
)
def test_memory_that_the_system_takes_itself(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_of(text)
    assert told in caught.value.message
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("give all of its memory, as '")


def test_of_a_small_memory_the_system_takes_more_than_its_part() -> None:
    assert [device_of(text).usable_bytes for text in ("M1 8GB", "M1 4GB", "M1 3GB", "L4")] == [
        *(5_726_633_984, 2_000_000_000, 1_000_000_000),
        int(0.94 * 24e9),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--device", "99999999 x M1 Pro 32GB"],
            "--device: more than 1,024 computers cannot be planned",
        ),
        (
            ["--device", f"{'9' * 5000} x M1"],
            "--device: more than 1,024 computers cannot be planned",
        ),
        (["--device", "\u00b2 x M1"], "is not a computer that is known"),
        (
            ["--device", "1000 x M1, 25 x M1"],
            "--device: more than 1,024 computers cannot be planned",
        ),
        (["--device", "M1", "--price-per-hour", "inf"], "--price-per-hour: inf is no amount"),
        (["--device", "M1", "--price-per-hour", "nan"], "--price-per-hour: nan is no amount"),
        (["--device", "M1", "--price-per-hour", "-1"], "--price-per-hour: -1 is no amount"),
        (["--device", "M1", "--watts", "nan"], "--watts: nan is no amount"),
        (["--device", "M1", "--price-per-kwh", "inf"], "--price-per-kwh: inf is no amount"),
        (["--price-per-kwh", "0.3"], "--price-per-kwh: the price of energy needs a power"),
    ],
)
def test_computers_and_prices_that_cannot_be(
    tmp_path: Path, tiny_model: Path, words: list[str], told: str
) -> None:
    done = call_allhands(
        "plan", *words, "--model", str(tiny_model), "--iters", "9", "--json", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr
    assert "what to do: " in done.stderr
    assert "training" not in done.stderr.splitlines()[0], "before anything is trained"


def test_the_power_that_is_taken_is_told(tmp_path: Path, tiny_model: Path) -> None:
    words = (*DEVICE, "--model", str(tiny_model), "--price-per-kwh", "0.3", "--json")
    notes = json.loads(call_allhands(*words, cwd=tmp_path).stdout)["notes"]
    assert any("--watts" in note and "40 for M1 Pro" in note for note in notes)
    given = json.loads(call_allhands(*words, "--watts", "50", cwd=tmp_path).stdout)["notes"]
    assert not [note for note in given if "--watts" in note]


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("10GbE,-5ms", "'-5ms' is no delay", "give one from 0 on, as 10GbE,5ms"),
        ("100Mbit/s,soon", "'soon' is no delay", "give one from 0 on, as 100Mbit/s,5ms"),
        ("0Gbit/s", "a link of 0Gbit/s sends nothing", "give a rate above 0, as 400Mbit/s"),
        (
            "-1Mbit/s,5ms",
            "a link of -1Mbit/s sends nothing",
            "give a rate above 0, as 400Mbit/s",
        ),
    ],
)
def test_what_is_wrong_with_a_link_is_named(text: str, told: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        link_of(text)
    assert (caught.value.message, caught.value.where, caught.value.hint) == (told, "--link", hint)
