"""Train a model: `python -m src.train mixer=loglinear_gdn data=pystdlib`; `--help` lists every option."""

import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from src import config, runs
from src.callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from src.callbacks.manifest import Manifest
from src.callbacks.memory import Memory
from src.callbacks.nonfinite import NonFiniteError, NonFiniteGuard
from src.callbacks.preemption import Aborted, Preempted, Preemption, Unstarted, before_training
from src.callbacks.progress import Progress
from src.callbacks.throughput import Throughput
from src.callbacks.validation import EdgeValidation
from src.carry import check_bounded
from src.config import Config
from src.data import DataModule
from src.data.common.tokenizer import load_tokenizer
from src.errors import UserError
from src.generation import Sampling, generate, stream_text
from src.loggers import CsvLogger, TensorBoard, quiet_lightning
from src.metrics import recall_rows, recall_table
from src.module import LanguageModule, check_backend, open_checkpoint
from src.options import one_line
from src.output import forgiving
from src.registry import DATA
from src.start import Start


def main(cfg: Config) -> None:
    """Train and turn every foreseen end into an exit status: 130 Ctrl-C, 143 SIGTERM, 1 a non-finite loss."""
    with forgiving():
        _main(cfg)


def _main(cfg: Config) -> None:
    try:
        train(cfg)
    except Preempted as stop:
        # Rank 0 alone reports the signal: a launcher kills all ranks as soon as one of them fails.
        if not runs.is_child():
            print(f"{stop}\nresume with: {resume_command(cfg)}")
            raise SystemExit(stop.exit_status) from None
    except Unstarted as stop:
        if not runs.is_child():
            sys.stderr.write(f"{stop}\n")
        raise SystemExit(stop.exit_status) from None
    except (Aborted, KeyboardInterrupt):
        sys.stderr.write("aborted: nothing saved since the last checkpoint\n")
        raise SystemExit(130) from None
    except NonFiniteError as error:
        if not runs.is_child():
            sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None


def train(cfg: Config) -> Path:
    """One run from its options to its folder, which is returned."""
    quiet_lightning()
    on_cuda = cfg.trainer.accelerator != "cpu" and torch.cuda.is_available()
    check_backend(cfg.mixer, "cuda" if on_cuda else "cpu", cfg.trainer.precision)
    run_dir = runs.create(cfg)
    with runs.hold(run_dir):
        return train_in(run_dir, cfg)


def train_in(run_dir: Path, cfg: Config) -> Path:
    """`train`, in a folder that is this process's own."""
    try:
        with before_training():
            data, module, start_step = prepare(run_dir, cfg)
            if start_step >= cfg.trainer.max_steps:
                steps = f"{start_step} steps done, trainer.max_steps={cfg.trainer.max_steps}"
                say(f"run {cfg.run.name} is finished: {steps}; a larger trainer.max_steps continues it")
                return run_dir
            trainer = build_trainer(cfg, run_dir, data, module, start_step)
    except BaseException:
        # A mistake that shows only now must not leave an empty folder behind, which would hold the name.
        if not runs.is_child():
            (run_dir / runs.LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                run_dir.rmdir()
        raise

    if start_step and (changes := runs.changes(cfg, run_dir)):
        say("changed: " + "; ".join(changes))
    last = last_checkpoint(run_dir)
    if trainer.is_global_zero:
        last.parent.mkdir(exist_ok=True)
        config.save(cfg, run_dir / runs.CONFIG_FILE)
        data.save_tokenizer(run_dir)
    trainer.loggers[0].start(config.asdict(cfg))
    describe(cfg, run_dir, data, module, start_step)

    trainer.fit(module, datamodule=data, ckpt_path=last if start_step else None, weights_only=True)

    if trainer.is_global_zero:
        report(module, trainer)
        if cfg.trainer.sample_tokens and data.tokenizer is not None:
            sample(module.to(trainer.strategy.root_device), data, cfg)
        print(f"\nrun folder: {run_dir}\ncurves:     tensorboard --logdir {shlex.quote(str(run_dir.parent))}")
    return run_dir


def last_checkpoint(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "last.ckpt"


def prepare(run_dir: Path, cfg: Config) -> tuple[DataModule, LanguageModule, int]:
    """The data on disk, the model, and the step that the run has reached (0: a new one)."""
    if getattr(cfg.data, "carry_state", False):
        check_carried(cfg)  # before the data, which may take hours
    last = last_checkpoint(run_dir)
    start = Start.of(cfg) if cfg.init_from and not last.is_file() else None
    data = DATA.get(cfg.data.name)(cfg.data, seed=cfg.seed, micro_batch_size=cfg.trainer.micro_batch_size)
    data.prepare_data()
    data.setup("fit")

    seed_everything(cfg.seed, verbose=False)
    module = LanguageModule(config.asdict(cfg), data.vocab_size, cfg.model.max_seq_len or data.max_seq_len)
    module.configure_model()
    if start:
        start.load_into(module)

    saved = saved_checkpoint(last)
    start_step = saved.get("global_step", 0)
    if start_step:
        check_same_data(run_dir, saved, data)
    return data, module, start_step


def build_trainer(cfg: Config, run_dir: Path, data: DataModule, module: LanguageModule, start_step: int) -> Trainer:
    options = cfg.trainer
    folder = run_dir / "checkpoints"
    try:
        trainer = Trainer(
            max_steps=options.max_steps,
            max_epochs=-1,
            accelerator=options.accelerator,
            devices=options.devices,
            num_nodes=options.num_nodes,
            strategy=options.strategy,
            precision=options.precision,
            gradient_clip_val=options.grad_clip,
            check_val_every_n_epoch=None,
            limit_val_batches=options.val_batches or 1.0,
            num_sanity_val_steps=0,
            log_every_n_steps=options.log_every,
            use_distributed_sampler=False,
            logger=[TensorBoard(run_dir, start_step), CsvLogger(run_dir, start_step)],
            callbacks=[  # in the order in which they are called
                Preemption(folder / "last.ckpt"),
                Manifest(run_dir, config.asdict(cfg), data.describe()),
                NonFiniteGuard(),
                Throughput(),
                Memory(),
                Progress(options.progress),
                EdgeValidation(options.val_every),
                LastCheckpoint(folder, options.checkpoint_every),
                BestCheckpoint(folder),
            ],
            default_root_dir=run_dir,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (ValueError, MisconfigurationException) as error:  # a strategy or a device that is not there
        chosen = ", ".join(f"{key}={getattr(options, key)}" for key in ("accelerator", "devices", "strategy"))
        raise UserError(f"trainer ({chosen}): {one_line(error)}") from error
    if trainer.world_size != runs.launched() > 1:
        # Lightning would train each of them alone, all in one folder.
        raise UserError(
            f"trainer.devices={options.devices}, trainer.num_nodes={options.num_nodes}: {runs.launched()} ranks were "
            f"started for {trainer.world_size} (trainer.devices=auto takes a node's GPUs)"
        )
    # Both depend on the number of ranks, which only the trainer knows.
    data.trainer = trainer
    trainer.accumulate_grad_batches = data.accumulation
    trainer.val_check_interval = options.val_every * data.accumulation
    return trainer


def check_carried(cfg: Config) -> None:
    """Raises UserError where rows cannot continue each other."""
    with torch.device("meta"):
        module = LanguageModule(config.asdict(cfg), vocab_size=1, max_seq_len=cfg.data.seq_len)
        module.configure_model()
    check_bounded(module.model, cfg.mixer.name)
    if cfg.trainer.compile:
        raise UserError(
            "trainer.compile=true: steps with a carried state are not compiled; data.carry_state needs false"
        )


def saved_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, empty where there is none; tensors are not read."""
    if not path.is_file():
        return {}
    return open_checkpoint(path, "meta", "; another run.name starts a new run")


def check_same_data(run_dir: Path, saved: dict[str, Any], data: DataModule) -> None:
    """Raises UserError if the files behind the same options changed since `saved`: step numbers say which rows
    come next, and token ids what they mean, of the same text and tokenizer only."""
    cannot = f"run {run_dir.name!r} cannot be continued"
    before = saved.get(type(data).__qualname__, data.state_dict())
    if before != data.state_dict():
        was, now = before["fingerprint"], data.fingerprint
        raise UserError(f"{cannot}: its data changed (fingerprint {now}, not {was}); start another run.name on it")
    if data.tokenizer is not None and data.tokenizer.fingerprint != load_tokenizer(run_dir).fingerprint:
        raise UserError(f"{cannot}: data.tokenizer={data.config.tokenizer} is not the one that the run keeps")


def resume_command(cfg: Config) -> str:
    options = [f"run.name={cfg.run.name}"] + ([] if cfg.run.dir == "runs" else [f"run.dir={cfg.run.dir}"])
    return shlex.join(["python", "-m", "src.train", "resume=auto", *options])


def describe(cfg: Config, run_dir: Path, data: DataModule, module: LanguageModule, start_step: int) -> None:
    model, seq_len = module.model, data.config.seq_len
    new = ", a new one: there was none of that name to continue" if cfg.resume else ""
    new += f", from the weights of {cfg.init_from}" if cfg.init_from else ""
    say(f"run:   {run_dir}" + (f", continued after step {start_step}" if start_step else new))
    facts = data.describe()
    say("data:  " + ", ".join(f"{key} {value}" for key, value in facts.items() if "." not in key))
    for split in ("train", "val", "test"):
        counts = {k.partition(".")[2]: v for k, v in facts.items() if k.startswith(f"{split}.")}
        if counts:
            say(f"       {split}: " + ", ".join(f"{number:,} {what}" for what, number in counts.items()))
    for note in data.notes():
        say(f"note:  {note}")
    say(
        f"model: {cfg.mixer.name}, {model.num_parameters():,} parameters"
        f" ({model.num_parameters(embedding=False):,} without embeddings),"
        f" at most {model.peak_state_bytes(seq_len):,} bytes of state within {seq_len:,} tokens"
    )


def report(module: LanguageModule, trainer: Trainer) -> None:
    """Validation before and after, as a table."""
    names = {"loss": "val/loss", "perplexity": "val/perplexity", "word perplexity": "val/word_perplexity"}
    names |= {"bits per byte": "val/bits_per_byte", "accuracy": "val/accuracy", "exact match": "val/exact_match"}
    before, after = module.first_validation, module.metrics
    print(f"\nvalidation      {'before':>10} {'after':>10}")
    for name, tag in names.items():
        if tag in after:
            print(f"{name:<15} {before.get(tag, float('nan')):>10.5g} {after[tag]:>10.5g}")
    if "val/loss" in before:
        fell = before["val/loss"] - after["val/loss"]
        print(f"the validation loss fell by {fell:.4f} nats a token in {trainer.global_step} steps")
    if len(module.recall_kinds) > 1:
        print(recall_table(recall_rows(module.recall_kinds)))
    rates = [c.mean for c in trainer.callbacks if isinstance(c, Throughput) and c.mean]
    if rates:
        print(f"{rates[0]:,.0f} tokens/s")


def sample(module: LanguageModule, data: DataModule, cfg: Config) -> None:
    print("\nsample:")
    ids = generate(
        module.model.eval(),
        [data.tokenizer.eot],
        cfg.trainer.sample_tokens,
        Sampling(temperature=0.8, top_p=0.95),
        seed=cfg.seed,
        stop=data.tokenizer.eot,
    )
    for text in stream_text(ids, data.tokenizer.decode):
        print(text, end="", flush=True)
    print()


def say(text: str) -> None:
    """Print on rank 0 only."""
    if not runs.is_child():
        print(text, flush=True)


if __name__ == "__main__":
    config.run_cli(main, Config)
