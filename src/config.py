"""The options of a run: their types, their defaults, and how a command line becomes one `Config`.

Later beats earlier: dataclass defaults < configs/<group>/<choice>.yaml < configs/config.yaml <
experiment=<name> < the command line. A preset belongs to the place that chooses it: `trainer=debug` on the
command line beats what an experiment says about the trainer. Options that an experiment gives to one mixer
(or data module) are left out when another one is chosen. `resume=auto` starts from the options that the run
was saved with, `init_from=` from the mixer and model of another run; what the command line says besides still beats
them.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from src import runs
from src.compose import CONFIGS, Layer, groups, resolve, resolve_layers
from src.config_help import render
from src.errors import UserError
from src.files import to_yaml, write_text
from src.model import ModelConfig
from src.ops.checks import KernelError
from src.optim import OptimConfig
from src.options import asdict, one_line
from src.output import checked
from src.registry import DATA, MIXERS

__all__ = [
    "Config",
    "RunConfig",
    "TrainerConfig",
    "asdict",
    "compose",
    "from_dict",
    "load",
    "run_cli",
    "save",
]


@dataclass
class RunConfig:
    """The run's folder."""

    name: str | None = None
    """Folder of the run inside run.dir; null: generated from mixer, data and time."""
    dir: str = "runs"
    """Folder that holds all runs."""

    def __post_init__(self) -> None:
        if self.name is not None:
            runs.check_name(self.name)
        if not self.dir:
            raise UserError("run.dir is empty: give a folder (. is the current one)")


@dataclass
class TrainerConfig:
    """How long, how often, and on what hardware."""

    max_steps: int = 250
    """Optimizer steps of the whole run."""
    micro_batch_size: int | None = None
    """Rows per rank and forward pass; null: all of a step's rows at once. Accumulation is derived from it."""
    val_every: int = 100
    """Optimizer steps between validations; step 0 and the last step are validated too."""
    val_batches: int | None = None
    """Batches per validation at most, for quick looks; null: all (data.val_rows of a corpus)."""
    log_every: int = 10
    """Optimizer steps between two logged points."""
    checkpoint_every: int = 100
    """Optimizer steps between two saved checkpoints (last.ckpt); the end of the run is saved too."""
    grad_clip: float | None = 1.0
    """Largest L2 norm of all gradients; larger ones are scaled down. null: no clipping."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Arithmetic: fp32, or bf16 where autocast allows; parameters and decay sums stay fp32 in both."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of device; auto: a GPU where there is one."""
    devices: int | Literal["auto"] = 1
    """Devices per node; auto: all GPUs (data.batch_size must be a multiple of their number), or one CPU process."""
    num_nodes: int = 1
    """Machines that train together."""
    strategy: str = "auto"
    """Lightning's strategy by name; auto: one device, or DDP over several."""
    compile: bool = False
    """Compile every block and the loss with torch.compile: faster steps after about a minute."""
    progress: bool | None = None
    """Show a progress bar; null: only in a terminal."""
    sample_tokens: int = 64
    """Tokens of the sample that is generated after training; 0: none."""

    def __post_init__(self) -> None:
        least = {"max_steps": 1, "micro_batch_size": 1, "val_every": 1, "val_batches": 1, "log_every": 1}
        least |= {"checkpoint_every": 1, "devices": 1, "num_nodes": 1, "sample_tokens": 0}
        for key, lowest in least.items():
            value = getattr(self, key)
            if isinstance(value, int) and value < lowest:
                raise UserError(f"trainer.{key}={value}: must be at least {lowest}")
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise UserError(f"trainer.grad_clip={self.grad_clip}: must be above 0 (null: no clipping)")


@dataclass(kw_only=True)
class Config:
    """Train a language model: one mixer, one corpus or task."""

    seed: int = 0
    """Seed of initial weights and of the order of the training data."""
    resume: Literal["auto"] | None = None
    """auto: continue the run of that run.name on its next unseen batch, or start it if there is none."""
    init_from: str | None = None
    """A run, by name in run.dir or by path, to start from: its weights, model and mixer options, and tokenizer."""
    plugins: list[str] = field(default_factory=list)
    """Python files that define more mixers or data modules, each named like its file."""
    run: RunConfig = field(default_factory=RunConfig)
    # The chosen plugin's own Config; its class is known only once the choice is.
    mixer: Any = field(metadata={"group": MIXERS})
    data: Any = field(metadata={"group": DATA})
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"group": None})
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig, metadata={"group": None})

    def __post_init__(self) -> None:
        rows, micro = getattr(self.data, "batch_size", None), self.trainer.micro_batch_size
        if rows is not None and micro is not None and rows % micro:
            raise UserError(f"trainer.micro_batch_size={micro}: must divide data.batch_size={rows}")
        check_seed(self.seed)


def check_seed(seed: int) -> None:
    """Raises UserError for a seed that the generators do not take."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed}: must be between 0 and {2**32 - 1}")


def compose(argv: Sequence[str] = (), schema: type = Config, configs: Path = CONFIGS) -> Any:
    """The `schema` instance that `key=value` arguments describe, nested real dataclasses throughout.

    A notebook calls `compose(["mixer=softmax", "optim.lr=1e-3"])`. Raises UserError, always of one line.
    """
    return resolve(list(argv), schema, configs).build()


def from_dict(plain: dict[str, Any], schema: type = Config, origin: str = "saved options") -> Any:
    """The `schema` instance of which `asdict` made `plain`; loads the plugin files that it names."""
    return resolve_layers([Layer(origin, plain)], schema, CONFIGS).build()


def save(cfg: Any, path: str | Path) -> None:
    """Writes the options as YAML that `load` and `experiment=` read; the file appears whole or not at all."""
    write_text(Path(path), to_yaml(asdict(cfg)))


def load(run_dir: str | Path, schema: type = Config) -> Any:
    """The options of a run, from its `config.yaml`."""
    path = Path(run_dir) / runs.CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{run_dir} is no run folder (it holds no {runs.CONFIG_FILE})")
    return from_dict(runs.saved_options(Path(run_dir)), schema, str(path))


def run_cli(main: Callable[[Any], object], schema: type = Config, argv: Sequence[str] | None = None) -> None:
    """Runs `main(options)` for a command line, `--help` and `--cfg` included.

    A UserError is printed as `error: ...` and ends the process with status 2, and so is a KernelError: kernels that
    give wrong values on this machine. Other exceptions pass through.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = [a for a in arguments if a in ("--help", "-h", "--cfg")]
    try:
        with checked():
            inherited = runs.inherited_config() if groups(schema) and not flags else None
            if inherited is not None:
                main(from_dict(inherited, schema))
                return
            resolved = resolve([a for a in arguments if a not in flags], schema, CONFIGS)
            if "--cfg" in flags:
                sys.stdout.write(to_yaml(asdict(resolved.build())))
            elif flags:
                sys.stdout.write(render(resolved))
            else:
                main(resolved.build())
    except (UserError, KernelError) as error:
        sys.stderr.write(f"error: {one_line(error)}\n")
        raise SystemExit(2) from None
