"""Sampling from a model: prefill by the chunked form, then token by token with the state."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from src.errors import UserError
from src.model import LanguageModel


@dataclass
class Sampling:
    """How the next token is drawn from its logits; in this order: temperature, top-k, top-p."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable token."""
    top_k: int | None = None
    """Draw from the k most probable tokens only; null: from all."""
    top_p: float = 1.0
    """Draw from the fewest most probable tokens whose probabilities reach p (at least one); 1: from all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: must be 1 or more (null draws from all tokens)")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be between 0 (most probable token) and 1 (all tokens)")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[..., V]` logits to the probabilities that tokens are drawn with, in fp32; greedy is one-hot."""
    logits = logits.float()
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The largest logit goes to 0 first, so that a tiny temperature cannot overflow.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    ordered, order = logits.sort(dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[..., sampling.top_k :] = False
    if sampling.top_p < 1:
        p = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= p.cumsum(-1) - p < sampling.top_p  # the mass before a token has not reached top_p yet
        keep[..., 0] = True
    p = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
    return torch.zeros_like(p).scatter_(-1, order, p)


@dataclass
class Timing:
    """Filled while generating: seconds and tokens of prefill and steps; at the end, what the state has come to."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    step_seconds: float = 0.0
    positions: int = 0
    """Tokens that the state has read: the last new one only where another was asked for after it."""
    state_bytes: int = 0


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    stop: int | None = None,
    timing: Timing | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids after `prompt` (at least one id); ends before the id `stop`.

    Draws come from a CPU generator, so that a seed gives the same text on every device (up to rounding).
    """
    if not prompt:
        raise ValueError("prompt: expected at least one token id, came none")
    timing = timing or Timing()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([list(prompt)], device=device)
    start = time.perf_counter()
    logits, state = model.step(ids, None, last_only=True)
    state = state.for_decoding(max_new_tokens)
    p = probabilities(logits[0, -1], sampling).cpu()
    timing.prompt_tokens, timing.prefill_seconds = len(prompt), time.perf_counter() - start
    timing.positions = len(prompt)
    try:
        for i in range(max_new_tokens):
            token = int(torch.multinomial(p, 1, generator=generator))
            if token == stop:
                return
            timing.new_tokens += 1
            yield token
            if i + 1 == max_new_tokens:
                return
            start = time.perf_counter()
            logits, state = model.step(torch.tensor([[token]], device=device), state)
            p = probabilities(logits[0, -1], sampling).cpu()
            timing.positions += 1
            timing.step_seconds += time.perf_counter() - start
    finally:
        timing.state_bytes = state.num_bytes  # once: it may wait for the device


def stream_text(ids: Iterator[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Pieces of text as ids arrive; a character that is cut between two tokens waits for its rest.

    Where all is shown, only the last token is kept and decoded before the next ones: some tokenizers decode the
    first token of a text otherwise than the same token inside it.
    """
    seen: list[int] = []  # one token that is shown already, then those that are not, or not whole
    shown = 0  # characters of their text
    for token in ids:
        seen.append(token)
        rest = decode(seen)[shown:]
        whole = len(rest.rstrip("\ufffd"))
        # The beginning of a character is at most 3 bytes, each of them one U+FFFD or all of them; more is no UTF-8.
        end = max(whole, len(rest) - 3)
        if end > 0:
            yield rest[:end]
            shown += end
        if whole == len(rest):
            seen = [token]
            shown = len(decode(seen))
    if tail := decode(seen)[shown:] if seen else "":
        yield tail
