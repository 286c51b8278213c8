"""Names of the files and directories in a run's directory."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
ANSWERS_FILE = "answers.json"  # a person's answers to `allhands compare`
PLOT_FILE = "loss.png"
MEMORY_FILE = "memory.png"
CONFIG_FILE = "adapter_config.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
# The last and the best model of a pre-training run.
MODELS_OF_A_RUN = (MODEL, BEST_MODEL) = ("model", "model-best")
LOGS = "logs"
PLAN_FILE = "plan.json"
