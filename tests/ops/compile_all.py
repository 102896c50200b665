"""``python -m tests.ops.compile_all bfloat16 128 64``: every kernel that such calls take, compiled for a Hopper GPU.

Needs no GPU. Prints one line of JSON a kernel: its name, and the bytes of shared memory that a program asks for.
"""

import json
import sys
from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from src.ops.kernels import passes, ssd

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
HEADS = 4
LENGTH = 300


def launches(dtype: torch.dtype, K: int, V: int) -> Iterator[tuple]:
    """What both operators launch, over rows, packed documents and documents that continue; nothing is run."""
    found: list[tuple] = []
    passes.launch = lambda kernel, programs, arguments, **options: found.append((kernel, arguments, options))
    ssd._trust = lambda *_, **__: None
    q = torch.zeros(1, LENGTH, 2, K, dtype=dtype)
    v, g = torch.zeros(1, LENGTH, HEADS, V, dtype=dtype), torch.zeros(1, LENGTH, HEADS)
    documents = ssd.documents_of(torch.tensor([0, 100, LENGTH]))
    for scales in (None, torch.zeros(1, LENGTH, HEADS, 9)):
        roots = torch.zeros(*([] if scales is None else [3]), 2, HEADS, K, V)
        levels = -1 if scales is None else 5
        for packing, old, state in ((None, None, False), (documents, None, False), (documents, roots, True)):
            rest = (q, q, v, g, scales, packing, old, 1.0, 4 if old is not None else 0)
            _, new = ssd.ssd_forward._init_fn(*rest, max(0, levels) if state else -1)
            ssd.ssd_backward._init_fn(v, torch.zeros_like(new) if state else None, *rest)
    yield from found


def compiled(kernel, arguments: dict, options: dict):
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = NAMES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    names = {"warps": "num_warps", "stages": "num_stages", "registers": "maxnreg"}
    chosen = {names[name]: value for name, value in options.items() if value is not None}
    key = kernel.__name__, json.dumps([signature, constants, chosen], default=str)
    return key, lambda: triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32), options=chosen
    )


def main() -> None:
    dtype, K, V = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    seen = set()
    for launch in launches(dtype, K, V):
        key, make = compiled(*launch)
        if key not in seen:
            seen.add(key)
            print(json.dumps([key[0], make().metadata.shared]), flush=True)


if __name__ == "__main__":
    main()
