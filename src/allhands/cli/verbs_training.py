"""Options of verbs that share options with training: each class is the command line of a verb."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from allhands.cli.options import options_of
from allhands.cli.verbs_models import Backend, ModelArgument, ModelOption
from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import TrainConfig

_EVALUATED = (
    "model",
    "adapter_path",
    "data",
    "split",
    "mask_prompt",
    "train_on",
    "chat_template",
    "system",
    "max_seq_length",
    "packing",
    "test_batches",
    "batch_size",
    "micro_batch_tokens",
    "num_ranks",
    "backend",
    "cores_per_rank",
    "hostfile",
    "hosts",
    "strategy",
    "tp",
    "cp",
    "ep",
    "pp_split",
    "config",
    "trust_remote_code",
)
# Options of training that decide its data.
_CHECKED = (
    "model",
    "max_seq_length",
    "mask_prompt",
    "train_on",
    "chat_template",
    "system",
    "fine_tune_type",
    "num_layers",
    "lora_parameters",
    "batch_size",
    "iters",
    "epochs",
    "packing",
    "isolate_documents",
    "seed",
    *(name for name in TrainConfig.model_fields if name.endswith("_feature")),
    "hf_dataset",
    "trust_remote_code",
    "config",
)
_COMPARED = (
    "data",
    "fine_tune_type",
    "num_layers",
    "max_seq_length",
    "lora_parameters",
    "mask_prompt",
    "chat_template",
    "system",
    "grad_checkpoint",
    "compile",
    "trust_remote_code",
)


def _said(name: str) -> str:
    """Return the help text of ``allhands train`` for the option ``name``."""
    return TrainConfig.model_fields[name].description or ""


class Launch(NamedTuple):
    """Run your own program on every rank; restart it after faults.

    For example: allhands launch -n 2 -- python my_script.py --my-option
    """

    command: Annotated[list[str] | None, Argument(metavar="-- COMMAND", help="The program.")] = None
    num_ranks: Annotated[
        int | None,
        Option(
            "-n",
            "--num-ranks",
            min=1,
            max=1024,
            help="Processes; with --hostfile: ranks at most. [1, all slots]",
        ),
    ] = None
    hostfile: Annotated[str | None, Option(help=_said("hostfile"))] = None
    hosts: Annotated[str | None, Option(help=_said("hosts"))] = None
    backend: Annotated[Backend, Option(metavar="|".join(Backend), help=_said("backend"))] = (
        Backend.auto
    )
    cores_per_rank: Annotated[int | None, Option(min=1, help=_said("cores_per_rank"))] = None
    min_ranks: Annotated[int | None, Option(min=1, help=_said("min_ranks"))] = None
    max_restarts: Annotated[int, Option(min=0, help="Restarts after a fault.")] = 3
    hang_timeout_s: Annotated[
        float,
        Option(help="Seconds without a call of allhands.progress that count as a hang."),
    ] = 600.0
    start_timeout_s: Annotated[
        float | None,
        Option(
            help="Seconds until every rank must call allhands.progress. [no limit]",
        ),
    ] = None
    stop_grace_s: Annotated[float, Option(help=_said("stop_grace_s"))] = 60.0
    log_dir: Annotated[Path, Option(help="Directory for logs and events.jsonl.")] = Path("logs")
    checkpoints: Annotated[
        Path | None,
        Option(help="Directory for allhands.save_checkpoint. [that of --log-dir]"),
    ] = None
    tag_output: Annotated[
        bool | None,
        Option(
            "--tag-output/--no-tag-output",
            help="Show the lines of all ranks, each beginning with its rank, or only those of rank 0. "
            "[tagged with several ranks]",
            show_default=False,
        ),
    ] = None


class Eval(NamedTuple):
    """Measure loss and perplexity of a model on a split of the data.

    The result is the same on any number of processes. Plain texts also get bits per byte. --tasks
    runs benchmarks instead.
    """

    flags: Annotated[dict[str, Any], options_of(EvalConfig, _EVALUATED)]
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False
    tasks: Annotated[
        str | None,
        Option(help="Run benchmarks of lm-evaluation-harness (a,b), or your own YAML files."),
    ] = None
    limit: Annotated[int | None, Option(min=1, help="With --tasks: examples of each task.")] = None
    num_shots: Annotated[
        int | None,
        Option(min=0, help="With --tasks: solved examples in each prompt."),
    ] = None


# Split of the data.
Split = StrEnum("Split", ["train", "valid", "test"])


class DataCheck(NamedTuple):
    """Show a dataset as training would see it, and warn of problems.

    DIR is the --data of allhands train: a folder, 'demo' or a Hub dataset. Options, defaults and
    the YAML file (-c) are those of training.
    """

    flags: Annotated[dict[str, Any], options_of(TrainConfig, _CHECKED)]
    data: Annotated[
        str | None, Argument(metavar="DIR", help="The data. [demo]", show_default=False)
    ] = None
    show: Annotated[
        int,
        Option(
            help="Examples to print as training sees them.",
            min=0,
            metavar="N",
            show_default=False,
        ),
    ] = 0
    row: Annotated[
        list[int] | None,
        Option(help="Print the example of this line. Repeatable.", min=1, metavar="LINE"),
    ] = None
    split: Annotated[
        Split | None, Option(help="Only train, valid or test. [all]", metavar="NAME")
    ] = None
    strict: Annotated[
        bool, Option("--strict", help="End with exit code 3 if there is a serious problem.")
    ] = False
    as_json: Annotated[bool, Option("--json", help="Print numbers and findings as JSON.")] = False


class ModelCheck(NamedTuple):
    """Compare a training step's loss and gradient with those of mlx_lm's own model.

    Both compute a short row and a long one. Every training does this before its first step, with
    fewer blocks for a large model. Options are those of training; --data gives the longest row.
    """

    flags: Annotated[dict[str, Any], options_of(TrainConfig, _COMPARED)]
    source: ModelArgument = None
    model: ModelOption = None
