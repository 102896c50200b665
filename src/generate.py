"""Continue prompts with a trained model: `python -m src.generate run=<name> prompt="def "`, or `prompt_file=…`."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from src import config, runs
from src.config import check_seed
from src.data.common.files import Slice, pieces, read, reading
from src.data.common.tokenizer import Tokenizer, load_tokenizer
from src.errors import UserError
from src.generation import Sampling, Timing, generate_rows, stream_text
from src.model import LanguageModel
from src.module import check_backend, load_module, pick_device, set_beyond
from src.ops import costs
from src.options import show
from src.pieces import piece_size

MANY = 100
"""Steps from which on their beginning and their end are timed apart."""


@dataclass(kw_only=True)
class GenerateConfig(Sampling):
    """Continue a prompt with a trained model, or several prompts at once."""

    run: str
    """Name of the run in runs_dir, or the path of its folder."""
    prompt: str = ""
    """Text to continue; empty: a new document. It is repeated before the new text."""
    prompt_file: list[str] = field(default_factory=list)
    """UTF-8 files, each a prompt of any length (not repeated); several: each text under its file's name when done."""
    max_new_tokens: int = 256
    """Tokens to generate after each prompt at most; end-of-text ends earlier."""
    stop_at_end: bool = True
    """Whether end-of-text ends a text; false: go on, with a new document, until max_new_tokens."""
    seed: int = 0
    """Seed of the draws; of several prompts, each gives the text that it gives alone."""
    beyond: Literal["last", "mean", "decay"] | None = None
    """Scales of the levels beyond the trained length (log-linear mixers); null: as the run's mixer.beyond."""
    piece: int | None = None
    """Tokens of the prompts in a forward pass, which bounds the memory; null: 16384 on a GPU, 4096 on a CPU."""
    checkpoint: Literal["last", "best"] = "last"
    """Which checkpoint of the run: the last, or the one of the lowest validation loss."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: a GPU where there is one."""
    runs_dir: str = "runs"
    """Folder that holds the runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("max_new_tokens", "piece"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"{key}={value}: must be at least 1")
        check_seed(self.seed)
        if self.prompt and self.prompt_file:
            raise UserError(f"prompt={show(self.prompt)} and prompt_file are given both: give one of them")


def main(cfg: GenerateConfig) -> None:
    """The text goes to standard output, numbers and notes to standard error."""
    run_dir = runs.find(cfg.run, cfg.runs_dir)
    device = pick_device(cfg.device)
    check_backend(config.load(run_dir).mixer, device.type, "32-true")
    checkpoint = runs.checkpoint(run_dir, cfg.checkpoint)
    tokenizer = load_tokenizer(run_dir)
    names = cfg.prompt_file or ["the prompt"]
    prompts = [read_prompt(path, tokenizer) for path in cfg.prompt_file] or [encode([cfg.prompt], tokenizer)]
    module = load_module(checkpoint, device)
    set_beyond(module, cfg.beyond)
    model = module.model
    for name, prompt in zip(names, prompts, strict=True):
        if len(prompt) > model.max_seq_len:
            note(f"{name}'s {len(prompt):,} tokens exceed the {model.max_seq_len:,} of the training rows")

    timing = Timing()
    steps = generate_rows(
        model,
        prompts,
        cfg.max_new_tokens,
        cfg,
        seed=cfg.seed,
        stop=tokenizer.eot if cfg.stop_at_end else None,
        piece=cfg.piece,
        advance=progress(sum(map(len, prompts)), cfg.piece or piece_size(device)),
        timing=timing,
    )
    if len(prompts) == 1:
        sys.stdout.write(cfg.prompt)
        for text in stream_text((token for _, token in steps if token is not None), tokenizer.decode):
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        if timing.new_tokens < cfg.max_new_tokens:
            note("end of text")
    else:
        write_rows(steps, names, cfg.max_new_tokens, tokenizer)
    report(timing, model)


def read_prompt(path: str, tokenizer: Tokenizer) -> Tensor:
    """The token ids of a file. Raises UserError that names it."""
    file = Path(path).expanduser()
    try:
        with reading(file):
            size = file.stat().st_size
        if not file.is_file():
            raise UserError(f"{file} is not a file")
        if not size:
            note(f"{file} is empty: a new document begins")
        return encode(read(Slice(file, 0, size)), tokenizer)
    except UserError as error:
        raise UserError(f"prompt_file: {error}") from error


def encode(text: Iterable[str], tokenizer: Tokenizer) -> Tensor:
    """Ids of a text in blocks, after an end-of-text token: as training documents begin, so does a prompt."""
    parts = [torch.tensor([tokenizer.eot])]
    # A piece at a time: what the tokenizer keeps besides the ids is many times as large.
    parts += [torch.tensor(tokenizer.encode(piece), dtype=torch.int64) for piece in pieces(text)]
    return torch.cat(parts)


def progress(total: int, piece: int) -> Callable[[int], object]:
    """What shows how far the prompts are read, where that takes several forward passes."""
    bar = tqdm(total=total, desc="prompt", unit=" tokens", leave=False, disable=None if total > piece else True)

    def advance(tokens: int) -> None:
        bar.update(tokens)
        if bar.n >= total:
            bar.close()

    return advance


def write_rows(steps: Iterable[tuple[int, int | None]], names: list[str], most: int, tokenizer: Tokenizer) -> None:
    """Each row's text as soon as it has ended."""
    new: list[list[int]] = [[] for _ in names]
    for row, token in tqdm(steps, desc="new", unit=" tokens", leave=False, disable=None):
        if token is not None:
            new[row].append(token)
        if token is None or len(new[row]) == most:
            with tqdm.external_write_mode():
                sys.stdout.write(f"== {names[row]} ==\n{tokenizer.decode(new[row])}\n")
                sys.stdout.flush()
                if token is None:
                    note(f"{names[row]}: end of text")


def report(timing: Timing, model: LanguageModel) -> None:
    """Speeds and sizes."""
    note(f"prompt: {timing.prompt_tokens:,} tokens, {timing.prompt_tokens / timing.prefill_seconds:,.0f} tokens/s")
    if timing.steps:
        rate = sum(rows for rows, _ in timing.steps) / timing.step_seconds
        note(f"generated: {timing.new_tokens:,} tokens, {rate:,.0f} tokens/s")
    if len(timing.steps) >= MANY:
        tenth = len(timing.steps) // 10
        first, last = (timing.steps_a_second(part) for part in (slice(tenth), slice(-tenth, None)))
        note(f"each row: {first:,.0f} tokens/s in the first tenth of the steps, {last:,.0f} in the last")
    cache = model.config.n_layers * costs.attention_state(
        timing.positions, 1, model.config.d_model, model.config.d_model, model.embedding.weight.dtype
    )
    times = f", {cache / timing.state_bytes:,.1f} times as much" if cache >= timing.state_bytes else ""
    note(
        f"state: {timing.state_bytes:,} bytes after {timing.positions:,} tokens; keys and values of the model's width "
        f"in every layer, as softmax attention keeps: {cache:,} bytes{times}"
    )


def note(text: str) -> None:
    sys.stderr.write(f"[{text}]\n")


if __name__ == "__main__":
    config.run_cli(main, GenerateConfig)
