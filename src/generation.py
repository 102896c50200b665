"""Sampling from a model: prefill by the chunked form, then token by token with the state."""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from src.errors import UserError
from src.model import LanguageModel
from src.pieces import piece_size, prefill


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
    """Filled while generating: tokens and seconds of prefill and steps; at the end, what the states have come to."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    new_tokens: int = 0
    steps: list[tuple[int, float]] = field(default_factory=list)
    """Of each step after prefill, the tokens that it read (one a row that still went on) and its seconds."""
    positions: int = 0
    """Tokens that the states have read: a row's last new one only where another was asked for after it."""
    state_bytes: int = 0
    """Live bytes of the rows' states, each at its row's end."""

    @property
    def step_seconds(self) -> float:
        return sum(seconds for _, seconds in self.steps)

    def steps_a_second(self, part: slice = slice(None)) -> float:
        """Of some of the steps: the tokens a second that a row gets."""
        steps = self.steps[part]
        return len(steps) / sum(seconds for _, seconds in steps)


def generate(
    model: LanguageModel,
    prompt: Sequence[int] | Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int = 0,
    stop: int | None = None,
    timing: Timing | None = None,
) -> Iterator[int]:
    """Yield up to `max_new_tokens` ids after `prompt`: `generate_rows` of one row."""
    rows = generate_rows(model, [prompt], max_new_tokens, sampling, seed=seed, stop=stop, timing=timing)
    for _, token in rows:
        if token is not None:
            yield token


@torch.inference_mode()
def generate_rows(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int | Sequence[int] = 0,
    stop: int | None = None,
    ended: Container[int] = (),
    piece: int | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
    timing: Timing | None = None,
) -> Iterator[tuple[int, int | None]]:
    """Yield `(row, id)`: up to `max_new_tokens` ids after each prompt (at least one id), all rows step by step.

    A row ends before the id `stop`, of which `(row, None)` tells, or after an id at which the caller has put it
    into `ended`; the others go on without it. Each row draws from a CPU generator of its own: a row's ids are those
    that its prompt gives alone, and the same on every device (up to rounding).

    Args:
        seed: of every row, or one for each.
        piece: tokens of a forward pass while prompts are read; None: as the device.
        advance: is told how many tokens of the prompts have been read since its last call.
    """
    if not all(map(len, prompts)):
        raise ValueError("prompt: expected at least one token id, came none")
    timing = timing or Timing()
    device = next(model.parameters()).device
    live = list(range(len(prompts)))
    seeds = [seed] * len(prompts) if isinstance(seed, int) else seed
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    start = time.perf_counter()
    logits, state = prefill(model, prompts, piece or piece_size(device), advance)
    state = state.for_decoding(max_new_tokens)
    p = probabilities(logits, sampling).cpu()
    timing.prompt_tokens = timing.positions = sum(map(len, prompts))
    timing.prefill_seconds = time.perf_counter() - start
    try:
        for left in reversed(range(max_new_tokens)):  # tokens that a row may still have after this one
            tokens = [int(torch.multinomial(p[n], 1, generator=generators[row])) for n, row in enumerate(live)]
            on = []
            for n, row in enumerate(live):
                if tokens[n] == stop:
                    yield row, None
                    continue
                timing.new_tokens += 1
                yield row, tokens[n]
                if row not in ended:
                    on.append(n)
            if not on or not left:
                return
            start = time.perf_counter()
            if len(on) < len(live):
                timing.state_bytes += state.select([n for n in range(len(live)) if n not in on]).num_bytes
                state = state.select(on).for_decoding(left)
                live, tokens = [live[n] for n in on], [tokens[n] for n in on]
            logits, state = model.step(torch.tensor(tokens, device=device)[:, None], state)
            p = probabilities(logits[:, -1], sampling).cpu()
            timing.positions += len(live)
            timing.steps.append((len(live), time.perf_counter() - start))
    finally:
        timing.state_bytes += state.num_bytes  # not at every step: it may wait for the device


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
