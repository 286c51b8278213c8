"""Compute loss and gradient by allhands' public API and compare them with mlx_lm's: a worker of
``gradients.py``.

Reads one request a line from standard input, JSON, and answers each in one line. All runs of it are
in one process, one after the other, as in a notebook.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

import allhands  # before MLX, for its BLAS

# isort: split
import matplotlib.figure
import mlx.core as mx
import numpy as np
import transformers
from gradients_rows import BATCHES, answer_requests, tokens_of
from mlx.utils import tree_flatten

RANK = {"rank": 4, "scale": 2.0, "dropout": 0.0}
# With this seed batches come as short, long, short: what a long row leaves behind must not change a
# short one.
SEED = 17
STEPS = 3
COMPILED = "MLX_DISABLE_COMPILE" not in os.environ


class Kept(allhands.Callback):
    """Keeps the gradient of each step, and the report."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, np.ndarray]] = []
        self.losses: list[float] = []
        self.tokens: list[int] = []

    def after_backward(self, step: int, gradients: Any) -> None:
        named = {name: grad.astype(mx.float32) for name, grad in tree_flatten(gradients)}
        mx.eval(named)
        self.gradients.append({name: np.array(grad) for name, grad in named.items()})

    def on_train_report(self, report: Any) -> None:
        self.losses.append(report.loss)
        self.tokens.append(report.trained_tokens)


def train(request: dict[str, Any], run: dict[str, Any], kept: Kept) -> None:
    directory = Path(request["directory"])
    kind, _, layers = run["way"].partition(":")
    more: dict[str, Any] = {"fine_tune_type": "full"}
    if kind != "full":
        start = directory / f"start-{run['way']}.safetensors"
        told = start.with_suffix(".json")
        keys = json.loads(told.read_text()) if told.exists() else request["keys"]
        more = {
            "fine_tune_type": "dora" if kind == "dora" else "lora",
            "lora_parameters": RANK | ({"keys": keys} if keys else {}),
            # mlx_lm has made none where it cannot make adapters.
            "resume_adapter_file": str(start) if start.exists() else None,
        }
    out = directory / "out"
    shutil.rmtree(out, ignore_errors=True)
    allhands.finetune(
        model=str(directory / ("model-4bit" if kind == "4bit" else "model")),
        data=request["data"],
        num_layers=1 if layers == "last" else -1,
        grad_checkpoint=run["recompute"],
        # What is a graph on a GPU anyway need not be compiled.
        compile="on"
        if run["form"] == "graph" and (COMPILED or mx.default_device() == mx.cpu)
        else "off",
        adapter_path=str(out),
        iters=STEPS,
        batch_size=2,
        seed=SEED,
        max_seq_length=4096,
        val_batches=0,
        steps_per_report=1,
        # So little that no weight changes.
        optimizer="sgd",
        learning_rate=1e-30,
        keep_last=0,
        callbacks=[kept],
        progress=False,
        gradient_check=request["check"],
        **more,
    )


def norm(arrays: Any) -> float:
    return float(np.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays)))


def compared(want: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> dict[str, Any]:
    """How far two gradients are from each other: as a whole, and in the array where it is most.

    An array's own difference is a share of its norm, or of a hundredth of the whole one's, where
    that is more.
    """
    whole = norm(want.values())
    shared = [name for name in want if name in got and want[name].shape == got[name].shape]
    apart = {name: norm([want[name] - got[name]]) for name in shared}
    left = sorted(name for name in want if name not in shared and norm([want[name]]) > 0)
    added = sorted(got.keys() - want.keys())
    if not all(np.isfinite(each) for each in apart.values()) or not np.isfinite(whole):
        whose = [
            who
            for who, each in (("mlx_lm's", want), ("ours", got))
            if not np.isfinite(norm(each.values()))
        ]
        return {
            "whole": None,
            "worst": None,
            "array": "",
            "left": left,
            "added": added,
            "not finite": whose,
        }
    shares = {
        name: each / max(norm([want[name]]), 0.01 * whole, 1e-30) for name, each in apart.items()
    }
    worst = max(shares, key=shares.__getitem__, default="")
    return {
        "whole": norm(apart.values()) / max(whole, 1e-30),
        "worst": shares.get(worst, 0.0),
        "array": worst,
        "left": left,
        "added": added,
    }


def loaded(path: Path) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in mx.load(str(path)).items()}


def told(error: BaseException) -> str:
    """The error in a line, with the last places in allhands and at all."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames[-1:]]
    own = [f for f in frames if f"{os.sep}allhands{os.sep}" in f.filename]
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in own[-1:]] + places
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({', '.join(dict.fromkeys(places))})"


def one(request: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """What came of one run: differences by batch, or the message with which it was refused, or an
    error.
    """
    directory, kept, found = Path(request["directory"]), Kept(), dict[str, Any]()
    try:
        train(request, run, kept)
    except allhands.AllhandsError as error:
        found["refused"] = " ".join(str(error).replace(f"{directory}/", "").split())[:300]
    except (Exception, SystemExit) as error:
        found["traceback"] = told(error)
        if os.environ.get("GRADIENTS_TRACEBACKS"):
            traceback.print_exc()
    known = dict(zip(tokens_of(request["lengths"]), BATCHES, strict=True))
    before, seen = 0, list[str]()
    for step, (loss, tokens) in enumerate(zip(kept.losses, kept.tokens, strict=True)):
        batch = known[tokens - before]
        before = tokens
        place = batch if batch not in seen else f"{batch} again"
        seen.append(batch)
        gradient = kept.gradients[step]
        if request.get("spoil"):
            gradient = {
                n: (1.001 * g if i == 0 else g) for i, (n, g) in enumerate(gradient.items())
            }
        result: dict[str, Any] = {"loss": loss}
        theirs = directory / f"theirs-{run['way']}-{batch}.safetensors"
        if theirs.exists():
            result |= compared(want := loaded(theirs), gradient)
            judge = directory / f"judge-{run['way']}-{batch}.safetensors"
            if judge.exists():
                truth = loaded(judge)
                result["judge loss"] = request["judge losses"][run["way"]][batch]
                result["ours from judge"] = compared(truth, gradient)["whole"]
                result["theirs from judge"] = compared(truth, want)["whole"]
        found[place] = result
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The runs of one configuration."""
    found = [one(request, run) for run in request["runs"]]
    mx.clear_cache()
    return {"runs": found}


def load_any_tokenizer() -> None:
    """Let configurations be such as Transformers does not accept beside a tokenizer: those of
    models with own code.
    """
    usual = transformers.AutoTokenizer.from_pretrained

    def from_pretrained(path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return usual(path, *args, **kwargs)
        except Exception:
            return transformers.PreTrainedTokenizerFast.from_pretrained(path)

    transformers.AutoTokenizer.from_pretrained = from_pretrained


if __name__ == "__main__":
    load_any_tokenizer()
    # Nobody looks at these pictures, which take longer than the runs.
    matplotlib.figure.Figure.savefig = lambda self, file, **_: Path(file).write_bytes(b"")  # type: ignore[method-assign]
    answer_requests(answer)
