"""The names of what lies in a run's directory."""

from __future__ import annotations

METRICS_FILE = "metrics.jsonl"
ANSWERS_FILE = "answers.json"  # what `allhands compare` was told
PLOT_FILE = "loss.png"
MEMORY_FILE = "memory.png"
CONFIG_FILE = "adapter_config.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
# Of a run of pre-training: the last and the best model.
MODELS_OF_A_RUN = (MODEL, BEST_MODEL) = ("model", "model-best")
LOGS = "logs"
PLAN_FILE = "plan.json"
