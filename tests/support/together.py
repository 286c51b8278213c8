"""Two ways of dividing at once, or three, as options; and what they are compared on."""

from __future__ import annotations

from pathlib import Path

from tiny import write_model
from trained import write_models

FOUR = ("-n", "4", "--backend", "mpi")
WAYS = {
    "shard x tensor": (*FOUR, "--strategy", "fsdp", "--tp", "2"),
    "pipe x tensor": (*FOUR, "--strategy", "pipeline", "--tp", "2"),
    "pipe x shard": (*FOUR, "--strategy", "pipeline", "--dp-shard", "2"),
}
# Token positions are divided, and something else.
TWO, EIGHT, ROWS = ("-n", "2", "--backend", "ring"), ("-n", "8", "--backend", "mpi"), ("--cp", "2")
OF_ROWS = {
    "shard x context": (*TWO, *ROWS, "--strategy", "fsdp"),
    "shard x context of four": (*FOUR, *ROWS, "--strategy", "fsdp"),
    "tensor x context": (*FOUR, *ROWS, "--tp", "2"),
    "pipe x context": (*FOUR, *ROWS, "--strategy", "pipeline"),
}
OF_EIGHT = {
    "shard x context, copies": (*EIGHT, *ROWS, "--strategy", "fsdp", "--dp-shard", "2"),
    "shard x tensor x context": (*EIGHT, *ROWS, "--strategy", "fsdp", "--tp", "2"),
    "pipe x tensor x context": (*EIGHT, *ROWS, "--strategy", "pipeline", "--tp", "2"),
    "pipe x shard x context": (*EIGHT, *ROWS, "--strategy", "pipeline", "--dp-shard", "2"),
}
EXPERTS, ALL_IN_ONE = ("--ep", "2"), ("--ep", "2", "--tp", "2")
OF_EXPERTS = {
    "shard x expert": (*TWO, *EXPERTS, "--strategy", "fsdp"),
    "expert x context": (*FOUR, *EXPERTS, *ROWS),
    "shard x experts in matrices": (*FOUR, *ALL_IN_ONE, "--strategy", "fsdp"),
    "pipe x experts in matrices": (*FOUR, *ALL_IN_ONE, "--strategy", "pipeline"),
}
OF_MORE_EXPERTS = {
    "shard x expert, copies": (*FOUR, *EXPERTS, "--strategy", "fsdp"),
    "shard x expert, copies over a ring": ("-n", "4", *TWO[2:], *EXPERTS, "--strategy", "fsdp"),
    "experts in matrices x context": (*FOUR, *ALL_IN_ONE, *ROWS),
    "shard x experts in matrices x context": (*EIGHT, *ALL_IN_ONE, *ROWS, "--strategy", "fsdp"),
}
EVERY = WAYS | OF_ROWS | OF_EIGHT | OF_EXPERTS | OF_MORE_EXPERTS
ADAM = ("--fine-tune-type", "full", "--optimizer", "adamw", "--learning-rate", "0.001")


def write_models_of_every_way(folder: Path) -> Path:
    """The models of :func:`trained.write_models`, and one with experts."""
    write_model(write_models(folder) / "experts", layers=4, hidden=64, experts=4)
    return folder
