"""What `tools.bench` times: the candidates.

A candidate says why it cannot run here, makes its inputs out of the tokens that all candidates of a length share,
calls its operator, and has the same function in a slow form that is easy to believe, differentiable in the same
inputs. Nobody is timed who differs from that form, in outputs or gradients.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from src import ops
from src.ops.reference import parallel
from tools.bench_shapes import FAMILIES, SMALL, Setup, Tensors


class Candidate:
    """One column of the table."""

    about = ""
    ours = False
    """Ours must be right, or nothing is timed; another's that is wrong or raises is left out."""
    forward_only: str | None = None
    """Why its backward pass cannot run here, once that is known: then its forward pass alone is timed."""
    eager = False
    """An operator of ours called as it is: checked in fp64 and against each other, and timed token by token."""

    def __init__(self, name: str, family: str) -> None:
        self.name = name
        self.family = family

    def missing(self, setup: Setup) -> str | None:
        """Why it cannot run here."""
        return None

    def unasked(self, setup: Setup) -> str | None:
        """Why it runs only if --only names it."""
        return None

    def inputs(self, tokens: Tensors) -> Tensors:
        """What it is called with and differentiated in."""
        raise NotImplementedError

    def __call__(self, inputs: Tensors) -> Tensor:
        raise NotImplementedError

    def reference(self, inputs: Tensors) -> Tensor:
        """The same function of the same inputs, in their precision."""
        raise NotImplementedError

    def values(self, inputs: Tensors) -> Tensor:
        """The one of its inputs that is shaped like its output."""
        return inputs["v"]

    def check_at(self, setup: Setup, T: int, lengths: list[int]) -> tuple[Setup, int]:
        """Where it is compared with its reference: near the random length T (some kernels want whole blocks)."""
        return replace(setup, batch=min(2, setup.batch)), max(64, T - T % 64)


class Ours(Candidate):
    """An operator of this repository with one of its backends."""

    ours = eager = True

    def __init__(self, name: str, family: str, backend: str) -> None:
        super().__init__(name, family)
        self.loglinear = name.startswith("loglinear")
        self.backend = backend
        self.about = f"ops.{FAMILIES[family][self.loglinear]}, backend={backend!r}"

    def unasked(self, setup: Setup) -> str | None:
        if self.backend == "auto" or (setup.cuda and setup.shape in SMALL):
            return None
        return "slow at this shape" if setup.cuda else "is what backend='auto' takes here"

    def inputs(self, tokens: Tensors) -> Tensors:
        return tokens if self.loglinear else {name: x for name, x in tokens.items() if name != "level_scales"}

    def run(self, inputs: Tensors, **options: Any) -> tuple[Tensor, Any]:
        return getattr(ops, FAMILIES[self.family][self.loglinear])(**inputs, backend=self.backend, **options)

    def __call__(self, inputs: Tensors) -> Tensor:
        return self.run(inputs)[0]

    def reference(self, inputs: Tensors) -> Tensor:
        return parallel(**inputs)

    def check_at(self, setup: Setup, T: int, lengths: list[int]) -> tuple[Setup, int]:
        return replace(setup, batch=min(2, setup.batch)), T


class Compiled(Ours):
    """Our PyTorch form under torch.compile: what the kernels must beat to be worth having."""

    eager = False

    def __init__(self, name: str, family: str) -> None:
        super().__init__(name, family, "torch")
        self.about += " under torch.compile"
        self.compiled: Callable[[Tensors], Tensor] | None = None

    def unasked(self, setup: Setup) -> str | None:
        return None if setup.cuda and setup.shape in SMALL else "takes minutes to compile"

    def __call__(self, inputs: Tensors) -> Tensor:
        if self.compiled is None:
            torch._dynamo.config.recompile_limit = 64  # one for each length, with and without gradients
            operator = getattr(ops, FAMILIES[self.family][self.loglinear])
            self.compiled = torch.compile(lambda inputs: operator(**inputs, backend="torch")[0], dynamic=False)
        return self.compiled(inputs)

    def check_at(self, setup: Setup, T: int, lengths: list[int]) -> tuple[Setup, int]:
        # At a size that is timed too, where it can be: a further size is compiled anew.
        return (setup, min(lengths)) if min(lengths) <= 1024 else super().check_at(setup, T, lengths)


class Softmax(Candidate):
    """Causal softmax attention of as many heads, as wide as the values, or of the heads and dim that are given."""

    def __init__(
        self, name: str, family: str, backend: SDPBackend | None, attention: tuple[int, int] | None = None
    ) -> None:
        super().__init__(name, family)
        self.backend, self.attention = backend, attention
        self.about = f"scaled_dot_product_attention, {backend.name if backend else 'the kernel that PyTorch chooses'}"
        if attention:
            self.about += ", {} heads of {}".format(*attention)

    def missing(self, setup: Setup) -> str | None:
        if self.backend is None or (setup.cuda and setup.dtype == "bfloat16"):
            return None
        return "needs a CUDA device and bfloat16"

    def unasked(self, setup: Setup) -> str | None:
        return "flash2 and cudnn are the peers on a CUDA device" if self.backend is None and setup.cuda else None

    def inputs(self, tokens: Tensors) -> Tensors:
        v = tokens["v"]
        if self.attention and self.attention != v.shape[2:]:
            v = torch.randn(*v.shape[:2], *self.attention, dtype=v.dtype, device=v.device)
        return {"q": torch.randn_like(v), "k": torch.randn_like(v), "v": v}

    def __call__(self, inputs: Tensors) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs.values())
        if self.backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        with sdpa_kernel([self.backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def reference(self, inputs: Tensors) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs.values())
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(1, 2)


class Package(Candidate):
    """An operator of another package, imported when it is first called."""

    module = ""
    function = ""

    def __init__(self, name: str, family: str) -> None:
        super().__init__(name, family)
        self.about = f"{self.module}.{self.function}"

    def missing(self, setup: Setup) -> str | None:
        if not setup.cuda:
            return "needs a CUDA device"
        try:
            self.load()
        except Exception as error:  # not installed, or built for another torch
            return f"cannot import {self.module}: {one_line(error)}"
        return None

    def load(self) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), self.function)


class MambaSSM(Package):
    """Mamba-2's own kernels. Their time step both decays and scales the values: `g = -dt`, `v = x dt`."""

    module = "mamba_ssm.ops.triton.ssd_combined"
    function = "mamba_chunk_scan_combined"

    def inputs(self, tokens: Tensors) -> Tensors:
        return {"x": tokens["v"], "dt": -tokens["g"], "B": tokens["k"], "C": tokens["q"]}

    def __call__(self, inputs: Tensors) -> Tensor:
        A = inputs["dt"].new_full(inputs["dt"].shape[-1:], -1.0)
        return self.load()(inputs["x"], inputs["dt"], A, inputs["B"], inputs["C"], chunk_size=256)

    def values(self, inputs: Tensors) -> Tensor:
        return inputs["x"]

    def reference(self, inputs: Tensors) -> Tensor:
        return parallel(inputs["C"], inputs["B"], inputs["x"] * inputs["dt"][..., None], -inputs["dt"])


class FlaLogLinear(Package):
    """The kernels of the paper's authors."""

    module = "fla.ops.log_linear_attn"
    function = "chunk_log_linear_attn"

    def inputs(self, tokens: Tensors) -> Tensors:
        return tokens

    def __call__(self, inputs: Tensors) -> Tensor:
        return self.load()(*(inputs[name] for name in ("q", "k", "v", "g", "level_scales")))[0]

    def reference(self, inputs: Tensors) -> Tensor:
        return parallel(**inputs)


class FlaLinear(Package):
    """flash-linear-attention's kernels of the linear operator."""

    def __init__(self, name: str, family: str) -> None:
        short = "simple_gla" if family == "ssd" else "gated_delta_rule"
        self.module, self.function = f"fla.ops.{short}", f"chunk_{short}"
        super().__init__(name, family)

    def inputs(self, tokens: Tensors) -> Tensors:
        return {name: x for name, x in tokens.items() if name != "level_scales"}

    def __call__(self, inputs: Tensors) -> Tensor:
        q, k, v, *gates = inputs.values()
        if self.family == "ssd":  # knows no groups
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        return self.load()(q, k, v, *gates, scale=1.0)[0]

    def reference(self, inputs: Tensors) -> Tensor:
        return parallel(**inputs)


def candidates(family: str, attention: tuple[int, int] | None = None) -> dict[str, Candidate]:
    """All that there are for a family, by name, in the order of the table; `attention` as of :class:`Setup`."""
    made: list[Candidate] = [
        Ours("loglinear", family, "auto"),
        Ours("linear", family, "auto"),
        Ours("loglinear_torch", family, "torch"),
        Ours("linear_torch", family, "torch"),
        Compiled("loglinear_compiled", family),
        Softmax("flash2", family, SDPBackend.FLASH_ATTENTION, attention),
        Softmax("cudnn", family, SDPBackend.CUDNN_ATTENTION, attention),
        Softmax("softmax", family, None, attention),
        FlaLinear("fla_linear", family),
    ]
    if family == "ssd":
        made += [FlaLogLinear("fla_loglinear", family), MambaSSM("mamba_ssm", family)]
    return {candidate.name: candidate for candidate in made}


ALIASES = {"fla": ("fla_loglinear", "fla_linear")}


def choose(setup: Setup, only: list[str] | None) -> tuple[list[Candidate], dict[str, str]]:
    """Who runs, and why each other one does not. `only` is checked against :func:`candidates` by the caller."""
    chosen, left_out = [], {}
    asked = None if only is None else {name for one in only for name in ALIASES.get(one, (one,))}
    for name, candidate in candidates(setup.family, setup.attention).items():
        if asked is not None and name not in asked:
            continue
        reason = candidate.missing(setup)
        if reason is None and asked is None and (unasked := candidate.unasked(setup)):
            reason = f"{unasked} (--only {name} runs it)"
        if reason is None:
            chosen.append(candidate)
        else:
            left_out[name] = reason
    return chosen, left_out


def one_line(error: BaseException) -> str:
    """`TypeError: …`, its first line, short enough to be read in a list."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:200].removesuffix(": ")
