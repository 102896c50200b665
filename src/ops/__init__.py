"""Operators: functions only. The contract that every implementation keeps.

Per sequence and head, with ``t`` from 0 at the start of the sequence::

    ssd                 S_t = exp(g_t) S_{t-1} + k_t v_t^T
    gated_delta_rule    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
                        o_t = q_t^T S_t
    loglinear_ssd, loglinear_gated_delta_rule
                        the same transitions, but one state a level of the Fenwick partition (fenwick.py)
                        o_t = sum_l level_scales_{t,l} q_t^T S_{t,l}

* ``q, k [B, T, G, K]``, ``v [B, T, H, V]``, ``g, beta [B, T, H]``, ``level_scales [B, T, H, L]``; ``H % G == 0``,
  each q/k group serves ``H/G`` consecutive heads. Any ``T >= 1``; ``K`` a multiple of 16 up to 256, ``V`` up to
  512. ``g <= 0`` is a log decay per token; ``beta`` in [0, 1]; the delta rule expects keys of norm 1.
* Returns ``(o [B, T, H, V] in v's dtype, state or None)``. fp32 and bf16 inputs are computed in fp32, fp64 in
  fp64. Differentiable in every tensor argument, the initial state too.
* ``scale`` multiplies q.
* ``cu_seqlens [N+1]`` packs N documents in one row (B = 1): nothing crosses a boundary; empty ones are allowed.
  States then have one entry a document.
* ``initial_state`` continues exactly where a state was returned, whatever the split into calls.
* More levels than scales: the last scale serves every higher level.
* ``backend``: "auto" takes Triton on a CUDA device for fp32 and bf16, else PyTorch. Kernels check themselves against
  fp64 when they are first used; ``KernelError`` where they are wrong.
* ``ValueError`` names the argument, what was expected and what came.

Source: Guo et al., Log-Linear Attention, arXiv 2506.04761; Dao & Gu, Mamba-2, arXiv 2405.21060; Yang et al.,
Gated Delta Networks, arXiv 2412.06464.

Read ``fenwick.py``, then ``chunked.py``; ``reference.py`` has the definition, token by token. ``kernels/`` is the same
in Triton.
"""

from src.ops.attention import softmax_attention
from src.ops.checks import KernelError
from src.ops.convolution import short_convolution
from src.ops.fenwick import num_levels
from src.ops.linear import gated_delta_rule, loglinear_gated_delta_rule, loglinear_ssd, ssd
from src.ops.state import (
    AttentionState,
    ConvolutionState,
    LinearState,
    LogLinearState,
    MixerState,
    ModelState,
    State,
)

__all__ = [
    "AttentionState",
    "ConvolutionState",
    "KernelError",
    "LinearState",
    "LogLinearState",
    "MixerState",
    "ModelState",
    "State",
    "gated_delta_rule",
    "loglinear_gated_delta_rule",
    "loglinear_ssd",
    "num_levels",
    "short_convolution",
    "softmax_attention",
    "ssd",
]
