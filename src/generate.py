"""Continue a prompt with a trained model: `python -m src.generate run=<name> prompt="def "`."""

import sys
from dataclasses import dataclass
from typing import Literal

from src import config, runs
from src.data.common.tokenizer import load_tokenizer
from src.errors import UserError
from src.generation import Sampling, Timing, generate, stream_text
from src.module import check_backend, load_module, pick_device


@dataclass(kw_only=True)
class GenerateConfig(Sampling):
    """Continue a prompt with a trained model."""

    run: str
    """Name of the run in runs_dir, or the path of its folder."""
    prompt: str = ""
    """Text to continue; empty: a new document."""
    max_new_tokens: int = 256
    """Tokens to generate at most; end-of-text ends earlier."""
    seed: int = 0
    """Seed of the draws."""
    checkpoint: Literal["last", "best"] = "last"
    """Which checkpoint of the run: the last, or the one of the lowest validation loss."""
    device: str = "auto"
    """cpu, cuda, cuda:1 or mps; auto: a GPU where there is one."""
    runs_dir: str = "runs"
    """Folder that holds the runs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")


def main(cfg: GenerateConfig) -> None:
    """The text goes to standard output, numbers and notes to standard error."""
    run_dir = runs.find(cfg.run, cfg.runs_dir)
    device = pick_device(cfg.device)
    check_backend(config.load(run_dir).mixer, device.type, "32-true")
    checkpoint = runs.checkpoint(run_dir, cfg.checkpoint)
    tokenizer = load_tokenizer(run_dir)
    model = load_module(checkpoint, device).model
    # Training documents begin after an end-of-text token; so does a prompt.
    prompt = [tokenizer.eot, *tokenizer.encode(cfg.prompt)]
    if len(prompt) > model.max_seq_len:
        note(f"the prompt's {len(prompt):,} tokens exceed the {model.max_seq_len:,} of the training rows")
    timing = Timing()
    sys.stdout.write(cfg.prompt)
    ids = generate(model, prompt, cfg.max_new_tokens, cfg, seed=cfg.seed, stop=tokenizer.eot, timing=timing)
    for text in stream_text(ids, tokenizer.decode):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if timing.new_tokens < cfg.max_new_tokens:
        note("end of text")
    rate = timing.prompt_tokens / timing.prefill_seconds
    note(f"prompt: {timing.prompt_tokens:,} tokens, {rate:,.0f} tokens/s")
    if timing.step_seconds:
        steps = max(timing.new_tokens - 1, 1)
        note(f"generated: {timing.new_tokens:,} tokens, {steps / timing.step_seconds:,.0f} tokens/s")
    note(f"state: {timing.state_bytes:,} bytes after {timing.positions:,} tokens")


def note(text: str) -> None:
    sys.stderr.write(f"[{text}]\n")


if __name__ == "__main__":
    config.run_cli(main, GenerateConfig)
