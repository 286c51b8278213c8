"""Directories given as an adapter that are something else, files of one that are torn, and runs
that did harm.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import call_allhands
from tiny import write_adapter, write_chat_data, write_model
from written_runs import write_run

from allhands.checkpoints import Tensor, checkpoint_path, write_checkpoint
from allhands.errors import ConfigError, ModelError
from allhands.run.adapter_files import check_adapter, instead_of, model_below, warning_of


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("places")
    write_adapter(write_model(root / "model"), root / "adapter")
    write_chat_data(root / "data")
    (root / "empty").mkdir()
    shutil.copytree(root / "model", root / "pretrained" / "model")
    (root / "pretrained" / "metrics.jsonl").touch()
    shutil.copy(root / "adapter" / "adapter_config.json", root / "pretrained")
    _add_checkpoint(root / "pretrained", 40)
    (root / "pretrained" / "adapter_config.json").unlink()
    (root / "begun" / "logs").mkdir(parents=True)
    shutil.copytree(root / "adapter", root / "several" / "one")
    (root / "peft").mkdir()
    (root / "peft" / "adapter_model.safetensors").touch()
    return root


def _add_checkpoint(run: Path, step: int) -> Path:
    """A whole checkpoint of an adapter."""
    path, described = checkpoint_path(run, step), (run / "adapter_config.json").read_text()
    tensors = {"adapters.safetensors": [Tensor("one", "F32", (4,), bytes(16))]}
    write_checkpoint(
        path, step, "one", {"iteration": step}, tensors, {"adapter_config.json": described}
    )
    return path


_REMEDIES = {
    "model": "--model",
    "data": "--data",
    "empty": "allhands train",
    "none": "no such directory",
    "pretrained": "pretrained/model",
    "begun": "--save-every",
    "several": "several/one",
    "peft": "allhands import",
    "adapter/adapters.safetensors": "--adapter-path {}/adapter",
}
_CASES = [
    *((verb, name) for verb in ("generate", "eval", "fuse", "export") for name in _REMEDIES),
    *((verb, "model") for verb in ("chat", "serve", "compare")),
]


@pytest.mark.parametrize(("verb", "name"), _CASES)
def test_what_a_directory_is_and_what_to_do_with_it(places: Path, verb: str, name: str) -> None:
    more = {"generate": ["--prompt", "x"], "fuse": ["--save-path", places / "out"]}.get(verb, [])
    more += ["--to", "peft", "--out", places / "out"] if verb == "export" else []
    done = call_allhands(verb, "--model", places / "model", "--adapter-path", places / name, *more)
    assert done.returncode == 4, done.stderr
    assert _REMEDIES[name].format(places) in done.stderr
    assert not (places / "out").exists()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
@pytest.mark.parametrize(
    "spoil", [_cut, lambda file: file.write_bytes(b""), Path.unlink], ids=["cut", "empty", "gone"]
)
def test_a_torn_adapter_names_what_is_whole(
    places: Path, tmp_path: Path, name: str, spoil: Callable[[Path], object]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(places / "adapter", run)
    older, newer = _add_checkpoint(run, 10), _add_checkpoint(run, 20)
    check_adapter(run)
    spoil(run / name)
    with pytest.raises(ModelError) as caught:
        check_adapter(run)
    assert f"--adapter-path {newer}" in (caught.value.hint or "")
    # One that is damaged itself is not named, neither for the run nor for itself.
    _cut(newer / name)
    for torn in (run, newer):
        with pytest.raises(ModelError) as caught:
            check_adapter(torn)
        assert f"--adapter-path {older}" in (caught.value.hint or "")
    _cut(older / name)
    assert instead_of(run) is None


def test_a_checkpoint_of_pre_training_is_of_the_model_of_its_run(places: Path) -> None:
    config = {"model": "tokenizer", "tokenizer": "tokenizer", "shape": "llama"}
    run = places / "pretrained"
    assert model_below(run / "checkpoints" / "step-0000040", config) == str(run / "model")
    assert model_below(places / "adapter", {"model": "there"}) == "there"
    for place, described in ((places / "begun", config), (places / "adapter", {})):
        with pytest.raises(ConfigError):
            model_below(place, described)


_GOOD = {
    "train": lambda step: 2 + 2 / (1 + step / 10),
    "valid": lambda step: 2.1 + 2 / (1 + step / 10),
}
_RUINED = {"train": lambda step: 4.0 + step / 10, "valid": lambda step: 4.1 + step / 10}


@pytest.mark.parametrize(("curves", "told"), [(_GOOD, False), (_RUINED, True), (None, False)])
def test_weights_of_a_ruined_run_are_told_of(
    places: Path, tmp_path: Path, curves: dict[str, Callable[[int], float]] | None, told: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(places / "adapter", run)
    if curves is not None:
        kept = (run / "adapter_config.json").read_text()
        write_run(run, train=curves["train"], valid=curves["valid"])
        (run / "adapter_config.json").write_text(kept)
    words = [
        "fuse",
        "--model",
        places / "model",
        "--adapter-path",
        run,
        "--save-path",
        tmp_path / "fused",
    ]
    done = call_allhands(*words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning:") == told
    assert (warning_of(run) is not None) == told


def test_weights_are_judged_up_to_their_step(places: Path, tmp_path: Path) -> None:
    """A checkpoint from before the harm is what a person should take."""
    run = tmp_path / "run"
    shutil.copytree(places / "adapter", run)

    def thrown_off(step: int) -> float:
        return 2 + 2 / (1 + step / 10) if step <= 40 else 9.0

    _add_checkpoint(run, 40)
    _add_checkpoint(run, 100)
    write_run(run, steps=100, train=thrown_off, valid=thrown_off)
    assert warning_of(run) is not None
    assert warning_of(checkpoint_path(run, 100)) is not None
    assert warning_of(checkpoint_path(run, 40)) is None
