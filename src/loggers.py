"""TensorBoard events and `metrics.csv`, both directly in the run folder; and less noise on the terminal."""

import csv
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.tensorboard.summary import hparams as hparams_summaries


class TensorBoard(TensorBoardLogger):
    """Events in `run_dir` itself, so that `tensorboard --logdir runs` calls each run by its name.

    Args:
        run_dir: the run folder.
        start_step: optimizer steps done already; what an interrupted process wrote after it is hidden.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        purge = start_step + 1 if start_step else 0
        super().__init__(run_dir.parent, name="", version=run_dir.name, default_hp_metric=False, purge_step=purge)

    @rank_zero_only
    def start(self, options: Mapping[str, Any]) -> None:
        """List the run and its options in the HPARAMS tab; the metrics there are the last values of its tags.

        The summary of the "experiment" is left out: with one, TensorBoard shows the options of the first run that
        it finds as the columns for all; without, it collects the options and tags of all runs.
        """
        values = {key: _hparam(value) for key, value in flatten(options).items()}
        _experiment, start, self._end = hparams_summaries(values, {})
        self.experiment.file_writer.add_summary(start)
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file; a run that ended well is marked so in the HPARAMS tab."""
        if status == "success":
            self.experiment.file_writer.add_summary(self._end)
        super().finalize(status)

    @rank_zero_only
    def save(self) -> None:
        """Lightning would write an `hparams.yaml`; the run folder has `config.yaml`."""
        self.experiment.flush()


class CsvLogger(Logger):
    """`metrics.csv`: one row per step with everything logged at it, empty cells where nothing was.

    What an interrupted process wrote after `start_step` is dropped, and the file continued. A row is written
    when the next step begins and before a checkpoint, so that no checkpoint is ahead of the file; a new column,
    or a number that comes after its row was written, rewrites the file.
    """

    def __init__(self, run_dir: Path, start_step: int = 0) -> None:
        super().__init__()
        self.path = run_dir / "metrics.csv"
        self._columns = ["step"]
        self._row: dict[str, Any] = {}
        self._written = False  # whether the row is in the file
        if self.path.exists() and rank_zero_only.rank == 0:
            rows = [row for row in self._read() if int(row["step"]) <= start_step and start_step]
            if rows and int(rows[-1]["step"]) == start_step:
                self._row = {k: v for k, v in rows.pop().items() if v}
                self._row["step"] = start_step
            self._rewrite(rows)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        if self._row and self._row["step"] != step:
            self.save()
            self._row = {}
        elif self._written:
            self._rewrite(self._read()[:-1])
        self._written = False
        self._row |= {"step": step} | {k: float(v) for k, v in metrics.items()}

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()

    @rank_zero_only
    def save(self) -> None:
        """Write the present step's row."""
        if not self._row or self._written:
            return
        new = [key for key in self._row if key not in self._columns]
        if new or not self.path.exists():
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(self._row)
        self._written = True

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            self._columns = list(reader.fieldnames or self._columns)
        return rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, self.path)


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` to `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _hparam(value: Any) -> bool | float | str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, bool | int | float | str) else "null" if value is None else str(value)


def quiet_lightning() -> None:
    """Lightning's greetings and its advice about loaders and epochs, which this design makes void."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*You have overridden `on_before_batch_transfer`.*",  # meant: loaders know nothing of the loss
        r".*isinstance\(treespec, LeafSpec\).*",  # Lightning's own use of torch
        ".*IterableDataset.*has `__len__` defined.*",
        ".*Checkpoint directory.*exists and is not empty.*",
        ".*resuming from a checkpoint that ended before the epoch ended.*",
        ".*`LightningModule.configure_optimizers`.*",
        ".*lr_scheduler.step.*before.*optimizer.step.*",
    ):
        warnings.filterwarnings("ignore", message=message)
