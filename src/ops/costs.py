"""What the operators cost by formula: forward FLOPs a token, live bytes of a sequence's decoding state.

FLOPs are 2 a multiply-add, the mean over a sequence of ``seq_len`` tokens. The square inside a chunk (and the
whole one of softmax) counts as half, because a causal kernel skips the other half; element-wise work, masks
and padding are left out. What is counted is the chunkwise algorithm with chunks of ``CHUNK_SIZE`` tokens,
one product for each that the algebra needs. Our PyTorch forms do whole squares and some products more:
``tests/mixers/test_costs.py`` holds by how much.

Sizes: ``G`` query/key heads that serve ``H`` value heads, ``K`` and ``V`` their widths.
"""

import torch

from src.ops.fenwick import CHUNK_SIZE


def linear(d_in: int, d_out: int) -> float:
    """``y = x Wᵀ``."""
    return 2.0 * d_in * d_out


def short_convolution(D: int, W: int) -> float:
    """Depthwise, ``W`` taps on each of ``D`` channels: counted, though ours is element-wise."""
    return 2.0 * D * W


def softmax_attention(seq_len: int, H: int, K: int, V: int) -> float:
    """``q kᵀ`` and ``p v`` over half of the square."""
    return float(seq_len * H * (K + V))


def ssd(seq_len: int, G: int, H: int, K: int, V: int) -> float:
    """Inside a chunk ``q kᵀ`` (a group's) and ``p v``; then ``kᵀ v`` into the state and ``q S`` out of it."""
    C = _mean_chunk(seq_len)
    return G * K * C + H * (V * C + 4.0 * K * V)


def loglinear_ssd(seq_len: int, G: int, H: int, K: int, V: int) -> float:
    """As ``ssd``, but ``q S`` once for each live level; merging the tree's nodes is element-wise."""
    C, levels = _mean_chunk(seq_len), _mean_live_levels(seq_len)
    return G * K * C + H * (V * C + (2.0 + 2.0 * levels) * K * V)


def gated_delta_rule(seq_len: int, G: int, H: int, K: int, V: int) -> float:
    """Inside a chunk ``k kᵀ`` and ``q kᵀ`` (a group's), the triangular inverse (C³/3), ``W``, ``U``, ``p v``;
    ``W S``, ``q S`` and ``kᵀ v`` with the state."""
    C = _mean_chunk(seq_len)
    return 2.0 * G * K * C + H * (C * C / 3 + K * C + 2.0 * V * C + 6.0 * K * V)


def loglinear_gated_delta_rule(seq_len: int, G: int, H: int, K: int, V: int) -> float:
    """As ``gated_delta_rule``, plus ``p T_u`` (C³/3) and the projected query inside a chunk; outside it
    ``kᵀ v`` once, and ``W S``, ``kᵀ (W S)`` and ``q S`` for each live level."""
    C, levels = _mean_chunk(seq_len), _mean_live_levels(seq_len)
    return 2.0 * G * K * C + H * (2 * C * C / 3 + 2.0 * K * C + 2.0 * V * C + (2.0 + 6.0 * levels) * K * V)


def attention_state(seq_len: int, H: int, K: int, V: int, dtype: torch.dtype) -> int:
    """Keys and values of all tokens; ``H`` counts key/value heads."""
    return seq_len * H * (K + V) * dtype.itemsize


def convolution_state(D: int, W: int, dtype: torch.dtype) -> int:
    """The last ``W - 1`` inputs, kept from the first token on."""
    return (W - 1) * D * dtype.itemsize


def linear_state(H: int, K: int, V: int, dtype: torch.dtype) -> int:
    """One matrix a head in fp32 (fp64 for fp64 activations)."""
    return H * K * V * _accumulator_bytes(dtype)


def loglinear_state(seq_len: int, G: int, H: int, K: int, V: int, dtype: torch.dtype, *, beta: bool) -> int:
    """One matrix a head for each set bit of the chunk index, and ``k, v, g`` (and ``beta``) of the unfinished
    chunk's tokens: ``k, v`` in ``dtype``, the rest in fp32."""
    chunks, tokens = divmod(seq_len, CHUNK_SIZE)
    token = (G * K + H * V) * dtype.itemsize + H * (1 + beta) * _accumulator_bytes(dtype)
    return chunks.bit_count() * linear_state(H, K, V, dtype) + tokens * token


def _accumulator_bytes(dtype: torch.dtype) -> int:
    return torch.promote_types(dtype, torch.float32).itemsize


def _mean_chunk(seq_len: int) -> float:
    """Tokens in a token's chunk, the mean over the sequence; ``CHUNK_SIZE`` where it divides ``seq_len``."""
    full, rest = divmod(seq_len, CHUNK_SIZE)
    return (full * CHUNK_SIZE**2 + rest**2) / seq_len


def _mean_live_levels(seq_len: int) -> float:
    """Chunk levels that a token reads (set bits of its chunk's index), the mean over the sequence."""
    full, rest = divmod(seq_len, CHUNK_SIZE)
    return (sum(b.bit_count() for b in range(full)) * CHUNK_SIZE + full.bit_count() * rest) / seq_len


def register_counter_formulas() -> None:
    """Let ``torch.utils.flop_counter.FlopCounterMode`` count packed softmax attention on the CPU.

    It counts the whole square of one document, as PyTorch counts its own attention: shapes do not tell where
    documents end. A function, because the counter's module imports Triton, which choosing a mixer must not.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    from src.ops.attention import attention_by_document  # noqa: F401  registers the operator

    operator = torch.ops.loglinear.attention_by_document
    if operator in flop_registry:
        return

    @register_flop_formula(operator)
    def square(q: torch.Size, k: torch.Size, v: torch.Size, *_, out_shape: object = None, **__: object) -> int:
        (B, T, H, K), V = q, v[-1]
        return 2 * B * H * T * T * (K + V)
