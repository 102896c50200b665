"""task=lm_eval: tasks of EleutherAI's lm-evaluation-harness, and YAML tasks of your own (`task_path=`).

An extra: `pip install '.[lm-eval]'`. `src/evaluation/harness.py` is what the harness sees of a model.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from src.errors import UserError
from src.evaluation import Report, Trained

USES = {"tasks", "task_path", "limit", "num_fewshot"}
RESAMPLINGS = 1000
"""Of the standard errors that have no formula; the harness takes 100,000."""


def evaluate(trained: Trained) -> Report:
    options = trained.options
    if options.data:
        raise UserError(f"data.{next(iter(options.data))}: task=lm_eval does not use it: tasks bring their data")
    if not options.tasks:
        raise UserError("task=lm_eval needs tasks=[…]: names of the harness, or of your own tasks in task_path")
    if options.task_path is not None and not Path(options.task_path).is_dir():
        raise UserError(f"task_path={options.task_path}: no such folder")
    if find_spec("lm_eval") is None:
        raise UserError("task=lm_eval needs the package lm-eval: pip install '.[lm-eval]'")
    from src.evaluation import harness  # here, because it imports lm_eval

    found = harness.run(trained, RESAMPLINGS)
    return Report(
        values={
            "results": found["results"],
            **({"groups": found["groups"]} if found.get("groups") else {}),
            "versions": found["versions"],
            "num_fewshot": found["n-shot"],
            "examples": found["n-samples"],
            "lm_eval": harness.VERSION,
        },
        table=harness.table(found),
        scalars={
            f"{task}/{metric.removesuffix(',none')}": value
            for task, metrics in found["results"].items()
            for metric, value in metrics.items()
            if is_number(value) and "_stderr" not in metric and metric not in ("sample_len", "sample_count")
        },
        by_split=False,
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
