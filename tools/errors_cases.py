"""What `tools.errors` runs: its cases, their inputs, and how far the results are from fp64.

`rows` and `packed` are whole calls, one for every block size; `continued` is a sequence in two calls, the second from
the state of the first, so that gradients reach the first one through the state alone. The other kinds are inputs that
break careless arithmetic:

`repeated_keys`  all keys of a head are one; beta is 1 in the even heads, where each token replaces what the last one
                 wrote, and up to 0.1 in the others
`beta_zero`      beta is 0 in the even heads, which write nothing, and at half of the tokens in the others
`strong_decay`   g is -20 in the even heads, and in the others at one token in sixteen, 0 elsewhere
`no_decay`       g is 0
`long_keys`      keys of a norm between 0 and 2, so that a transition `I - beta k k^T` may enlarge (linear form only)

Errors are `||x - ref|| / ||ref||` over all heads. In an even head some of what is compared is 0 or nearly so (the
gate's gradient where nothing old is left, everything but beta's where nothing is written), and a relative error of that
alone would say nothing about arithmetic. The odd heads, stressed as well but not to the end, give every tensor a norm
of the ordinary size: what an even head gets wrong counts against that.

One gradient loses digits whoever computes it. A token's dg is the sum, over the tokens from there on, of what the
outputs give, `<do_t, o_t>`, less what the writes take back. In the even heads of `repeated_keys` the two cancel wholly,
and what is left of a chunk's sum is the rounding of its terms: in fp32 PyTorch 5e-6 of the odd heads' gradient, half
of the bound. There the error of dg counts against the norm of what cancels, the root of a chunk's 64 tokens times
`||<do_t, o_t>||`, about fifteen times `||ref||`; the other kinds hold dg to its own norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from src import ops
from src.ops.fenwick import CHUNK_SIZE
from src.ops.reference import parallel

OPERATORS = ("ssd", "loglinear_ssd", "gated_delta_rule", "loglinear_gated_delta_rule")
BOUNDS = {"bfloat16": 1e-2, "float32": 1e-5}
COLUMNS = ("output", "q", "k", "v", "g", "beta", "level_scales")
KINDS = ("rows", "packed", "continued", "repeated_keys", "beta_zero", "strong_decay", "no_decay", "long_keys")
KEY_DIMS = (16, 32, 64, 128, 256)
VALUE_DIMS = (16, 32, 64)
"""Blocks have 32 or 64 values, filled or not; what is larger takes several."""
SEVERAL = ((64, 128), (128, 128), (256, 128))
OTHERS = ((48, 80), (80, 48), (112, 208), (192, 384), (256, 512))
"""Head dims between the powers of two, and the largest."""
CONTINUED = ((64, 64), (128, 128), (192, 384))
STRESSED = ((64, 64), (128, 128))
DRAWS = 4
"""In bf16 the error of dg is half the bound on average and varies by a factor of three: a head's dg is a sum of few
large terms. Four draws together say more about the arithmetic than one."""
SPLIT = 701
"""Tokens of the first of two calls: odd, inside a chunk and inside a tile."""


@dataclass(frozen=True)
class Case:
    operator: str
    dtype: str
    K: int
    V: int
    kind: str = "rows"
    T: int = 1400
    """More than ten tiles of 128: trees of several levels, with a tile and a part of one left over."""

    @property
    def delta(self) -> bool:
        return "delta" in self.operator

    @property
    def loglinear(self) -> bool:
        return self.operator.startswith("loglinear")


def cases() -> list[Case]:
    """All of them, what takes longest to compile first."""
    whole = [*OTHERS, *SEVERAL, *[(K, V) for K in KEY_DIMS for V in VALUE_DIMS]]
    dims = {"rows": whole, "packed": [pair for pair in whole if pair not in OTHERS], "continued": CONTINUED}
    lengths = {"rows": 1400, "packed": 1400, "continued": 1400, "long_keys": 200}
    return [
        case
        for operator in reversed(OPERATORS)
        for dtype in BOUNDS
        for K, V in sorted(whole, reverse=True)
        for kind in KINDS
        if (K, V) in dims.get(kind, STRESSED)
        if takes(case := Case(operator, dtype, K, V, kind, lengths.get(kind, 400)))
    ]


def takes(case: Case) -> bool:
    """Whether the kind means something to the operator."""
    if case.kind == "long_keys":  # with states of several ages, only a product with decay in between stays bounded
        return case.operator == "gated_delta_rule"
    return case.delta or case.kind not in ("repeated_keys", "beta_zero")


def draw(case: Case) -> dict[str, Tensor]:
    """Fresh inputs of four heads, in whole calls in two groups. Keys have norm 1, gates and scales are fp32.

    Head h decays by up to `0.2 * 10**-h` a token. In the fastest head nothing reaches the next tile but one; in the
    slowest the first token still reaches the last, through every level of the tree, and so does the gradient.
    """
    H, T, kind, dtype = 4, case.T, case.kind, getattr(torch, case.dtype)
    G = 2 if kind in ("rows", "packed") else H
    even = torch.arange(H) % 2 == 0
    q, v = torch.randn(1, T, G, case.K), torch.randn(1, T, H, case.V)
    k = F.normalize(torch.randn(1, 1 if kind == "repeated_keys" else T, G, case.K), dim=-1).expand(q.shape)
    g = -0.2 * 10.0 ** -torch.arange(H) * torch.rand(1, T, H)
    beta = torch.randn(1, T, H).sigmoid()
    if kind == "repeated_keys":
        g, beta = -1e-3 * torch.rand(1, T, H), torch.where(even, 1.0, 0.1 * torch.rand(1, T, H))
    elif kind == "beta_zero":
        beta = torch.where(even | (torch.rand(1, T, H) < 0.5), 0.0, beta)
    elif kind == "strong_decay":
        g = torch.where(even | (torch.rand(1, T, H) < 1 / 16), -20.0, 0.0)
    elif kind == "no_decay":
        g = torch.zeros_like(g)
    elif kind == "long_keys":
        k = k * 2 * torch.rand(1, T, G, 1)
        g, beta = -0.2 - 0.2 * torch.rand(1, T, H), torch.rand(1, T, H)
    made = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g}
    if case.delta:
        made["beta"] = beta
    if case.loglinear:
        made["level_scales"] = torch.rand(1, T, H, ops.num_levels(T))
    return made


def run(case: Case, given: dict[str, Tensor], cu_seqlens: Tensor | None, backend: str) -> Tensor:
    """The output, in one call or, of a `continued` case, in two."""
    operator = getattr(ops, case.operator)
    if case.kind != "continued":
        return operator(**given, cu_seqlens=cu_seqlens, backend=backend)[0]
    split = min(SPLIT, case.T // 2 | 1)
    first, second = ({name: x[:, part] for name, x in given.items()} for part in (slice(split), slice(split, None)))
    o, state = operator(**first, return_state=True, backend=backend)
    return torch.cat([o, operator(**second, initial_state=state, backend=backend)[0]], 1)


def errors(case: Case, seed: int, device: str = "cuda", backend: str = "triton", draws: int = 1) -> dict[str, float]:
    """Relative errors of output and gradients, over so many draws of the inputs together."""
    torch.manual_seed(seed)
    squares: dict[str, tuple[float, float]] = {}
    for _ in range(draws):
        for name, pair in one_draw(case, device, backend).items():
            before = squares.get(name, (0.0, 0.0))
            squares[name] = before[0] + pair[0] ** 2, before[1] + pair[1] ** 2
    return {name: (wrong / size) ** 0.5 for name, (wrong, size) in squares.items()}


def one_draw(case: Case, device: str, backend: str) -> dict[str, tuple[float, float]]:
    """Of output and gradients, ``||x - ref||`` and what it counts against; documents of 0, 1 and 15 tokens among the
    packed ones.

    The last of the packed documents is long enough (more than nine tiles of 128) for a tree of its own.
    """
    given = {name: x.to(device).requires_grad_() for name, x in draw(case).items()}
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    cu_seqlens = torch.tensor([0, 0, 1, 16, 16, 150, case.T], device=device) if case.kind == "packed" else None
    o, reference = run(case, given, cu_seqlens, backend), parallel(**exact, cu_seqlens=cu_seqlens)
    weight = torch.randn_like(o)
    got = torch.autograd.grad(o, list(given.values()), weight)
    expected = torch.autograd.grad(reference, list(exact.values()), weight.double())
    pairs = {"output": (o, reference), **{n: (a, b) for n, a, b in zip(given, got, expected, strict=True)}}
    sizes = {name: b.norm() for name, (_, b) in pairs.items()}
    if case.kind == "repeated_keys":
        sizes["g"] = CHUNK_SIZE**0.5 * (weight * reference).sum(-1).norm()
    return {
        n: (float((a.detach().double() - b.detach()).norm()), float(sizes[n].detach())) for n, (a, b) in pairs.items()
    }
