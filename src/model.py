"""The language model: embedding, blocks, norm, head. Read it top to bottom.

Choices: pre-norm with RMSNorm; one mixer and one SwiGLU a block; no biases, no dropout, no position
embedding here (a mixer that needs positions has its own); embedding and head share one matrix by default;
initialised as GPT-2, N(0, init_std²) and residual projections smaller by sqrt(2 n_layers).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from src.errors import UserError
from src.layers import Embedding, Head, Linear, RMSNorm, SwiGLU, initialise, vocabulary_linear
from src.mixers import Mixer
from src.ops.state import ModelState, State
from src.registry import MIXERS


@dataclass
class ModelConfig:
    """Sizes of the model; the mixer's own options are under `mixer`."""

    d_model: int = 128
    """Width of the residual stream, a multiple of 16."""
    n_layers: int = 4
    """Blocks of one mixer and one MLP each."""
    mlp_ratio: float = 8 / 3
    """Hidden width of the SwiGLU over d_model, rounded to a multiple of 16; 0 leaves the MLPs out."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output head too."""
    norm_eps: float = 1e-5
    """Added to the mean square in the blocks' and the last RMSNorm."""
    max_seq_len: int | None = None
    """Longest training sequence in tokens: log-linear mixers have level scales for it; null: data.seq_len."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        if self.d_model < 16 or self.d_model % 16:
            raise UserError(f"model.d_model={self.d_model}: must be a positive multiple of 16")
        if self.n_layers < 1:
            raise UserError(f"model.n_layers={self.n_layers}: must be at least 1")
        if self.mlp_ratio < 0:
            raise UserError(f"model.mlp_ratio={self.mlp_ratio}: must be at least 0 (0 leaves the MLPs out)")
        if self.max_seq_len is not None and self.max_seq_len < 1:
            raise UserError(f"model.max_seq_len={self.max_seq_len}: must be at least 1 (or null)")


class Block(nn.Module):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`. The trainer compiles `forward` in place."""

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = mixer
        self.mlp: SwiGLU | None = None
        if config.mlp_ratio > 0:
            hidden = max(16, round(config.mlp_ratio * config.d_model / 16) * 16)
            self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
            self.mlp = SwiGLU(config.d_model, hidden, std_scale=mixer.residual_scale)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self._feed_forward(x + self.mixer(self.mixer_norm(x), cu_seqlens))

    def step(self, x: Tensor, state: State | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        y, state = self.mixer.step(self.mixer_norm(x), state, cu_seqlens)
        return self._feed_forward(x + y), state

    def _feed_forward(self, x: Tensor) -> Tensor:
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x))

    def flops_per_token(self, seq_len: int) -> float:
        mlp = 0.0 if self.mlp is None else self.mlp.flops_per_token()
        return self.mixer.flops_per_token(seq_len) + mlp


class LanguageModel(nn.Module):
    """Next-token logits of token ids.

    Args:
        config: sizes.
        mixer: options of the mixer, `mixer.name` says which.
        vocab_size: number of token ids.
        max_seq_len: longest training sequence, in tokens.

    Shapes: ids `[B, T]` → logits `[B, T, vocab_size]`; with `cu_seqlens [N + 1]`, N documents packed in one
    row (`B == 1`). Under `torch.device("meta")` nothing is initialised: call `.to_empty(device=…)` and then
    `layers.initialise` (Lightning's sharded strategies do the same), which equals building it directly.
    """

    def __init__(self, config: ModelConfig, mixer: Mixer.Config, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self._block_flops: dict[int, float] = {}  # of a token, by the row's length
        mixer_class = MIXERS.get(mixer.name)
        device = torch.get_default_device()
        # Always built on the meta device, so that constructors draw no random numbers and the weights are the
        # same whether the model is materialised here or by a sharded strategy.
        with torch.device("meta"):
            self.embedding = Embedding(vocab_size, config.d_model)
            self.blocks = nn.ModuleList(
                Block(
                    config,
                    mixer_class(
                        mixer,
                        d_model=config.d_model,
                        layer_idx=layer_idx,
                        n_layers=config.n_layers,
                        max_seq_len=max_seq_len,
                    ),
                )
                for layer_idx in range(config.n_layers)
            )
            self.norm = RMSNorm(config.d_model, config.norm_eps)
            # A tied head has no module: one parameter under two names is split in two by `to_empty`.
            self.lm_head = None if config.tie_embeddings else Head(config.d_model, vocab_size)
        for module in self.modules():
            if isinstance(module, Embedding | Linear):
                module.init_std = config.init_std
        if device.type != "meta":
            self.to_empty(device=device)
            initialise(self)

    def hidden(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """`[B, T]` ids to `[B, T, D]` after the last norm."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.norm(x)

    def head(self, h: Tensor) -> Tensor:
        """`[..., D]` to logits `[..., vocab_size]`: for all tokens, or only for those that have a label."""
        return vocabulary_linear(h, self.embedding.weight) if self.lm_head is None else self.lm_head(h)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(input_ids, cu_seqlens))

    def step(
        self,
        input_ids: Tensor,
        state: ModelState | None = None,
        cu_seqlens: Tensor | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, ModelState]:
        """Logits of one token or more after `state` (None: position 0: a prompt is one call); the new state.

        With `last_only`, logits only of the last token of every row `[B, 1, vocab_size]`, or of every packed
        document `[1, N, vocab_size]` (that of an empty document means nothing). The state of N packed
        documents continues as a batch of N rows or as N packed documents.
        """
        x, state = self.hidden_step(input_ids, state, cu_seqlens)
        if last_only:
            x = x[:, -1:] if cu_seqlens is None else x[:, (cu_seqlens[1:].long() - 1).clamp(min=0)]
        return self.head(x), state

    def hidden_step(
        self, input_ids: Tensor, state: ModelState | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:
        """`hidden` after `state`, and the new state."""
        x = self.embedding(input_ids)
        states = []
        for i, block in enumerate(self.blocks):
            x, block_state = block.step(x, None if state is None else state.layers[i], cu_seqlens)
            states.append(block_state)
        return self.norm(x), ModelState.of_layers(states)

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs a token, the mean over a sequence of `seq_len`; training takes three times that."""
        return self.flops(1, seq_len, 1)

    def flops(self, n_tokens: int, seq_len: int, n_logits: int) -> float:
        """Forward FLOPs of `n_tokens` in rows of `seq_len`, with logits at `n_logits` places only."""
        if seq_len not in self._block_flops:  # asked at every step of training
            self._block_flops[seq_len] = sum(block.flops_per_token(seq_len) for block in self.blocks)
        return n_tokens * self._block_flops[seq_len] + n_logits * 2.0 * self.config.d_model * self.vocab_size

    def state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """Live bytes of one sequence's decoding state after `seq_len` tokens, over all layers."""
        return sum(block.mixer.state_bytes(seq_len, dtype) for block in self.blocks)

    def peak_state_bytes(self, seq_len: int, dtype: torch.dtype = torch.float32) -> int:
        """The most live bytes of a sequence's decoding state at any of its first `seq_len` tokens.

        A log-linear state has a matrix for each set bit of its number of chunks: after a power of two just one. Among
        the numbers up to `seq_len`, those that end in ones, and `seq_len` itself, have the most of them.
        """
        ends = {((seq_len + 1) >> bit << bit) - 1 for bit in range((seq_len + 1).bit_length())} | {seq_len}
        return max(self.state_bytes(n, dtype) for n in ends if n > 0)

    def num_parameters(self, *, embedding: bool = True) -> int:
        """Number of parameters, with or without the embedding and head matrices."""
        outside = () if embedding else ("embedding.", "lm_head.")
        return sum(p.numel() for name, p in self.named_parameters() if not name.startswith(outside))
