"""Sequences longer than memory: read piece by piece, the mixers' states carried from one to the next.

A row of packed documents is cut at fixed places, wherever documents end. A piece therefore begins with at most
one document that an earlier piece began, and only that one's state has to be carried. With mixers of bounded
state (all but softmax attention) memory does not grow with the sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from src.model import LanguageModel
from src.ops.state import ModelState

LOGITS = 1 << 26
"""Logits that are in memory at once: 256 MiB in fp32."""


def piece_size(device: torch.device) -> int:
    """Tokens of a forward pass where nobody says otherwise."""
    return 16384 if device.type == "cuda" else 4096


@dataclass(frozen=True)
class Piece:
    """Places [begin, end) of a packed row and the documents in them."""

    begin: int
    end: int
    cu_seqlens: list[int]
    """Where they begin within the piece, and its length."""
    continues: bool
    """Whether the first of them began in the piece before."""
    goes_on: bool
    """Whether the last of them goes on in the next piece."""


def cut(cu_seqlens: Sequence[int], size: int) -> Iterator[Piece]:
    """A packed row in pieces of `size` tokens, the last one shorter; empty documents disappear."""
    ends = sorted({int(end) for end in cu_seqlens})
    total = ends[-1]
    for begin in range(0, total, size):
        end = min(begin + size, total)
        inside = [place - begin for place in ends if begin < place < end]
        yield Piece(begin, end, [0, *inside, end - begin], begin not in ends, end not in ends)


def hidden_pieces(
    model: LanguageModel, input_ids: Tensor, cu_seqlens: Sequence[int], size: int
) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with its hidden states `[1, n, D]`, of one packed row `input_ids [1, T]` on any device."""
    device = next(model.parameters()).device
    state: ModelState | None = None
    for piece in cut(cu_seqlens, size):
        ids = input_ids[:, piece.begin : piece.end].to(device)
        # One document needs no boundaries: softmax attention then takes its faster way.
        documents = len(piece.cu_seqlens) - 1
        cu = None if documents == 1 else torch.tensor(piece.cu_seqlens, dtype=torch.int32, device=device)
        before = spread(state, documents) if piece.continues else None
        if not piece.goes_on and before is None:
            state, hidden = None, model.hidden(ids, cu)
        else:
            hidden, after = model.hidden_step(ids, before, cu)
            state = after.select([documents - 1]) if piece.goes_on else None
        yield piece, hidden


def spread(state: ModelState, documents: int) -> ModelState:
    """The state of one sequence for the first of several documents; the others are at their beginning."""
    if documents == 1:
        return state
    return state.select([0] * documents).reset(list(range(1, documents)))


@torch.inference_mode()
def token_losses(
    model: LanguageModel, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    """Each place's negative log-likelihood in nats (fp32) and whether its label is the likeliest token.

    Args:
        input_ids: `[B, T]`.
        labels: `[B, T]`, negative where there is none; such a place has loss 0 and is not right.
        cu_seqlens: `[N + 1]` of packed documents (`B == 1`); None: B sequences.
        size: tokens in a forward pass; what that needs bounds the memory.

    Returns two tensors `[B, T]` on the CPU, the same as from one forward pass up to rounding.
    """
    B, T = input_ids.shape
    starts = range(0, B * T + 1, T) if cu_seqlens is None else cu_seqlens.tolist()
    nll, right = torch.zeros(B * T), torch.zeros(B * T, dtype=torch.bool)
    targets = labels.reshape(-1)
    for piece, hidden in hidden_pieces(model, input_ids.reshape(1, -1), starts, size):
        places = (targets[piece.begin : piece.end] >= 0).nonzero().flatten()
        here, label = (x.to(hidden.device) for x in (places, targets[piece.begin + places]))
        losses, hits = [], []  # fetched once a piece: to fetch is to wait for the device
        for part, wanted in zip(*(x.split(max(1, LOGITS // model.vocab_size)) for x in (here, label)), strict=True):
            logits = model.head(hidden[0].index_select(0, part)).float()
            losses.append(F.cross_entropy(logits, wanted, reduction="none"))
            hits.append(logits.argmax(-1) == wanted)
        nll[piece.begin + places] = torch.cat(losses).cpu()
        right[piece.begin + places] = torch.cat(hits).cpu()
    return nll.view(B, T), right.view(B, T)


@torch.inference_mode()
def prefill(
    model: LanguageModel,
    prompts: Sequence[Sequence[int] | Tensor],
    size: int,
    advance: Callable[[int], object] = lambda tokens: None,
) -> tuple[Tensor, ModelState]:
    """Logits after the last token of each prompt, `[N, vocab_size]`, and the state of N rows.

    Prompts of different lengths (at least one token) are packed, none is padded. In every call all N documents have
    their entry of the state, and most of them no token. `advance` is told how many tokens a call has read.
    """
    device = next(model.parameters()).device
    ends = torch.tensor([0, *map(len, prompts)]).cumsum(0)
    ids = torch.cat([torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts])[None]
    total, state = ids.shape[1], None
    logits: list[Tensor | None] = [None] * len(prompts)
    for begin in range(0, total, size):
        end = min(begin + size, total)
        cu = (ends - begin).clamp(0, end - begin)
        boundaries = None if len(prompts) == 1 else cu.int().to(device)
        hidden, state = model.hidden_step(ids[:, begin:end].to(device), state, boundaries)
        done = [n for n in range(len(prompts)) if begin < ends[n + 1] <= end]
        last = model.head(hidden[0, (ends[1:][done] - 1 - begin).to(device)])
        for n, row in zip(done, last, strict=True):
            logits[n] = row
        advance(end - begin)
    return torch.stack(logits), state
