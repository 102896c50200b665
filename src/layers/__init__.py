"""Modules that several mixers share; each says in its docstring what published code it equals."""

from src.layers.decay import init_decay
from src.layers.level_scales import Beyond, LevelScales
from src.layers.linear import Embedding, Head, Linear, initialise, vocabulary_linear
from src.layers.mlp import SwiGLU
from src.layers.norm import GatedRMSNorm, RMSNorm, l2_normalise, upcast
from src.layers.rope import apply_rope, token_positions
from src.layers.short_conv import ShortConvolution

__all__ = [
    "Beyond",
    "Embedding",
    "GatedRMSNorm",
    "Head",
    "LevelScales",
    "Linear",
    "RMSNorm",
    "ShortConvolution",
    "SwiGLU",
    "apply_rope",
    "init_decay",
    "initialise",
    "l2_normalise",
    "token_positions",
    "upcast",
    "vocabulary_linear",
]
