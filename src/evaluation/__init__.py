"""Measurements of a trained model: each file of this folder is one choice of `task=` of `python -m src.evaluate`.

A new one is a file with

    USES = {"split", "lengths"}                     # the options below that it looks at, besides the common ones

    def evaluate(trained: Trained) -> Report: ...

and its name in `TASKS`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from src import config, runs
from src.config import Config
from src.data import DataModule
from src.data.common.tokenizer import kept_tokenizer
from src.errors import UserError
from src.model import LanguageModel
from src.module import LanguageModule, check_backend, load_module, pick_device, set_beyond
from src.options import show, type_hints, unknown_key
from src.pieces import piece_size
from src.registry import DATA, build_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = ("perplexity", "positions", "mqar", "niah", "lm_eval")
COMMON = {"run", "task", "checkpoint", "data", "piece", "beyond", "precision", "device", "output", "runs_dir"}


@dataclass(kw_only=True)
class EvaluateConfig:
    """Measure a trained model: perplexity, loss by position, recall, needles, tasks of lm-evaluation-harness."""

    run: str
    """Name of the run in runs_dir, or the path of its folder."""
    task: Literal["perplexity", "positions", "mqar", "niah", "lm_eval"] | None = None
    """What is measured; null: what the run was trained on (mqar, niah, or else perplexity)."""
    split: Literal["val", "test"] = "val"
    """Which part of the data; all of it, not only the batches that training looked at."""
    lengths: list[int] = field(default_factory=list)
    """Lengths in tokens; empty: the trained one (perplexity), 8 times that (positions), all up to that (mqar, niah)."""
    max_tokens: int | None = None
    """Tokens of the split to look at, in whole rows of the greatest length, evenly spread, at least one (positions,
    perplexity; without text, of each length for itself); null: all."""
    examples: int | None = None
    """Examples of each cell; null: 1000 (mqar), 10 (niah)."""
    depths: int = 5
    """Depths of the needle, evenly from the beginning to the end (niah)."""
    tasks: list[str] = field(default_factory=list)
    """Needle tasks (niah; empty: those of the run, or all eight); tasks of the lm-evaluation-harness (lm_eval)."""
    task_path: str | None = None
    """Folder of your own YAML tasks, which tasks= may then name too (lm_eval)."""
    num_fewshot: int | None = None
    """Solved examples in front of each question (lm_eval); null: as each task says."""
    limit: int | None = None
    """Questions of each task at most, the first ones (lm_eval); null: all."""
    checkpoint: Literal["last", "best"] = "last"
    """Which checkpoint of the run: the last, or the one of the lowest validation loss."""
    data: dict[str, Any] = field(default_factory=dict)
    """Data options that replace the run's, as data.path=… or data.seq_len=…; data.name chooses other data."""
    beyond: Literal["last", "mean", "decay"] | None = None
    """Scales of the levels beyond the trained length (log-linear mixers); null: as the run's mixer.beyond."""
    piece: int | None = None
    """Tokens in a forward pass, longer rows carry the state on; null: 16384 on a GPU, 4096 on a CPU."""
    precision: Literal["32-true", "bf16-mixed"] | None = None
    """Arithmetic; null: as in training."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: a GPU where there is one."""
    output: str | None = None
    """JSON file to write, with its figure beside it; null: evaluation-<task>-<split>….json in the run folder."""
    runs_dir: str = "runs"
    """Folder that holds the runs."""

    def __post_init__(self) -> None:
        least = {"max_tokens": 1, "examples": 1, "depths": 1, "piece": 1, "limit": 1, "num_fewshot": 0}
        for key, lowest in least.items():
            value = getattr(self, key)
            if value is not None and value < lowest:
                raise UserError(f"{key}={value}: must be at least {lowest}")
        if self.data.get("name", "") is None:
            raise UserError("data.name=null: name the data, or leave it out for the run's")
        if self.output is not None and (not self.output.endswith(".json") or not Path(self.output).parent.is_dir()):
            raise UserError(f"output={self.output}: must end with .json and lie in a folder that exists")
        for length in self.lengths:
            if length < 1:
                raise UserError(f"lengths={show(self.lengths)}: each must be at least 1")


@dataclass
class Report:
    """What a task found."""

    values: dict[str, Any]
    """For the JSON file."""
    table: str
    """For the terminal."""
    scalars: dict[str, float] = field(default_factory=dict)
    """For TensorBoard, at the step of the checkpoint."""
    curve: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """For TensorBoard, at a step of their own: a length or a position."""
    figure: "Figure | None" = None
    by_split: bool = True
    """Whether it is of one split of the data."""


@dataclass
class Trained:
    """A trained model, and all that a task needs to measure it."""

    options: EvaluateConfig
    run: Config
    run_dir: Path
    module: LanguageModule
    device: torch.device
    precision: str

    @property
    def model(self) -> LanguageModel:
        return self.module.model

    @cached_property
    def trained_length(self) -> int:
        """Tokens of the longest training example, of this run or of the one that it started from."""
        own = DATA.get(self.run.data.name)(self.run.data).longest
        if self.run.model.max_seq_len is not None and not self.run.init_from:
            return own  # a number that the user gave makes level scales, and trains none
        return max(own, self.model.max_seq_len)

    @property
    def piece(self) -> int:
        """Tokens of a forward pass."""
        return self.options.piece or piece_size(self.device)

    def arithmetic(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16-mixed")

    def data(self, **changes: Any) -> DataModule:
        """The run's data with the options of the call, and further `changes`, set up."""
        data = build_data(self.run, self.run_dir, {**changes, **self.options.data})
        if data.vocab_size != self.model.vocab_size:
            raise UserError(
                f"data.name={data.config.name} has {data.vocab_size} token ids,"
                f" the model of run {self.run_dir.name} has {self.model.vocab_size}"
            )
        return data


def open_run(options: EvaluateConfig) -> Trained:
    """The run that the options name, its model on the device. Raises UserError."""
    run_dir = runs.find(options.run, options.runs_dir)
    device = pick_device(options.device)
    run = config.load(run_dir)
    precision = options.precision or run.trainer.precision
    check_backend(run.mixer, device.type, precision)
    module = load_module(runs.checkpoint(run_dir, options.checkpoint), device)
    set_beyond(module, options.beyond)
    return Trained(options, run, run_dir, module, device, precision)


def task_of(trained: Trained) -> tuple[str, Callable[[Trained], Report]]:
    """The task's name and function; raises UserError for an option that it would ignore."""
    options = trained.options
    own = options.data.get("name", trained.run.data.name)
    name = options.task or (own if own in TASKS else "perplexity")
    module = import_module(f"src.evaluation.{name}")
    for key, value in changed(options).items():
        if key not in COMMON | module.USES:
            raise UserError(f"{key}={show(value)}: task={name} does not use it")
    return name, module.evaluate


def changed(options: EvaluateConfig) -> dict[str, Any]:
    """The options that are not the default, but for those that change no number."""
    found = {}
    for option in fields(options):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        value = getattr(options, option.name)
        if option.name not in ("run", "task", "device", "output", "runs_dir") and value != default:
            found[option.name] = value
    return found


def build_data(run: Config, run_dir: Path, changes: Mapping[str, Any]) -> DataModule:
    """The data of a run with some options replaced, set up; text keeps the tokenizer that the run saved."""
    name = changes.get("name", run.data.name)
    cls = DATA.get(name)
    known = type_hints(cls.Config)
    for key in changes:
        if key not in known:
            raise UserError(unknown_key(f"data.{key}", [f"data.{option}" for option in known], known, f"data={name}"))
    saved = config.asdict(run.data)
    if name != run.data.name:
        saved = {"name": name, "seq_len": saved["seq_len"], "batch_size": saved["batch_size"]}
    if "val_rows" in known:
        if changes.get("val_rows") is not None:
            raise UserError("data.val_rows: all rows are looked at; max_tokens= takes a sample")
        saved["val_rows"] = None
    if "tokenizer" in known:
        # None is no choice: the token ids of another one would mean other text.
        tokenizer = kept_tokenizer(run_dir)
        if "tokenizer" in changes:
            raise UserError("data.tokenizer: a trained model keeps the tokenizer of its run")
        saved["tokenizer"] = str(tokenizer)
    # As many rows at once as training had room for, unless the call says how many.
    micro = None if "batch_size" in changes else run.trainer.micro_batch_size
    data = cls(build_options(cls, {**saved, **changes}, "data"), seed=run.seed, micro_batch_size=micro)
    data.prepare_data()
    data.setup("test")
    return data
