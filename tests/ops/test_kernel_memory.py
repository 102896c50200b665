"""What the kernels read, write and keep, and how they are dealt out."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from src.ops.kernels import plan, sizes, ssd
from src.ops.kernels.delta import ops as delta_ops
from src.ops.kernels.delta import passes as delta_passes
from src.ops.kernels.delta import sizes as delta_sizes
from tests.ops.helpers import inputs, leaves
from tests.ops.kernels import (
    DELTA,
    FAMILIES,
    ONE_KIND,
    assert_exact,
    both,
    change,
    deal,
    in_nan,
    little_scratch,
    run,
)


@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize("family", FAMILIES)
def test_reads_nothing_behind_its_inputs(family: str, seed: int) -> None:
    """Inputs are views into memory full of NaN."""
    assert_exact(family, inputs(family, 70, H=1), place=in_nan)


@ONE_KIND
@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_need_not_be_dense(family: str, seed: int) -> None:
    assert_exact(family, inputs(family, 70), place=lambda x: x.mT.contiguous().mT)


@ONE_KIND
@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize(
    ("family", "G", "H", "dealt"),
    [
        ("ssd", 2, 4, None),
        ("loglinear_ssd", 1, 3, None),
        pytest.param("loglinear_ssd", 4, 4, (1, 2), marks=pytest.mark.slow),
        ("loglinear_ssd", 1, 4, (1, 2)),
        ("gated_delta_rule", 2, 4, None),
        ("loglinear_gated_delta_rule", 1, 3, None),
    ],
)
def test_several_passes_over_heads(
    family: str, G: int, H: int, dealt: tuple[int, int] | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head each, of whole groups, and of parts of one, whose sums then go to the same place. Only the delta rule
    takes several forward too."""
    taken = []
    little_scratch(monkeypatch)
    if dealt:
        deal(monkeypatch, *dealt)
    module = delta_ops if family in DELTA else ssd
    make = module.Pass
    monkeypatch.setattr(module, "Pass", lambda *given, **more: taken.append(given[3]) or make(*given, **more))
    assert_exact(family, inputs(family, 140, G=G, H=H))
    if family in DELTA:
        assert taken == [1] * (2 * H)
    else:
        assert taken[1:] == ([dealt[1]] * 2 if dealt else [1] * H)


@pytest.mark.parametrize("pair", [0], indirect=True)
@pytest.mark.usefixtures("pair", "poisoned")
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_change_no_bit(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads at once, then a head after the other and, of the delta rule, two and then the third."""
    given, _ = both(inputs(family, 70, G=3, H=3))
    tensors = leaves(given)
    weight, runs = torch.randn_like(given["v"]), []

    def collect() -> None:
        o = run(family, given)
        runs.append([o, *torch.autograd.grad(o, list(tensors.values()), weight)])

    collect()
    little_scratch(monkeypatch)
    collect()
    if family in DELTA:
        # Of a byte a token and head, half may be taken at once.
        monkeypatch.setattr(delta_sizes.Sizes, "_bytes_a_token", lambda self, backward: 1.0)
        change(monkeypatch, SCRATCH_BYTES=70 * 3 // 2)
        taken, make = [], delta_ops.Pass
        monkeypatch.setattr(delta_ops, "Pass", lambda *a, **more: taken.append(a[2:]) or make(*a, **more))
        collect()
        assert taken == [(0, 2), (2, 1)] * 2
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("cuts", [None, [0, 0, 700, 1501, 4096]])
@pytest.mark.parametrize("family", DELTA)
def test_scratch_of_the_delta_rule(
    family: str, cuts: list[int] | None, stateful: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pass allocates is what passes are dealt out by. Nothing is run."""
    change(monkeypatch, launch=lambda *_, **__: None, _trust=lambda *_, **__: None)
    made: list[int] = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            x = function(*args, **(kwargs or {}))
            if function.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.zeros_like):
                made.append(x.nbytes)
            return x

    loglinear, T, H, K, V = family.startswith("loglinear"), 4096, 2, 64, 128
    x = torch.zeros(1, T, H, V, dtype=dtype), torch.zeros(1, T, H)
    keys, scales = torch.zeros(1, T, 1, K, dtype=dtype), torch.zeros(1, T, H, 13) if loglinear else None
    documents = None if cuts is None else ssd.documents_of(torch.tensor(cuts))
    options = {"stateful": stateful, "roots": False}
    levels = None
    for backward in (False, True):
        of = delta_sizes.sizes_of(keys, x[0], scales, documents, 0, **options, backward=backward)
        tensors = delta_ops._tensors(keys, keys, *x, x[1], scales, documents, None, 1.0, of)
        made.clear()
        with Allocations():
            part = delta_passes.Pass(of, tensors, 0, H, backward=backward)
            part.prepare(levels)
            if backward:
                part.backward(x[0], None, {})
        said = of._bytes_a_token(backward) * T * H
        assert 0.8 * said <= sum(made) <= 1.1 * said, (sum(made), said)


@ONE_KIND
@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("family", FAMILIES)
def test_training_keeps_the_inputs_only(family: str, seed: int) -> None:
    given, _ = both(inputs(family, 140))
    tensors = leaves(given)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        run(family, given)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in tensors.values()}


# How work is dealt out.


@pytest.mark.parametrize("passes", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(("groups", "per_group"), [(1, 1), (1, 48), (2, 2), (3, 1), (4, 6), (6, 8), (5, 3)])
def test_every_head_is_in_one_program_of_one_pass(groups: int, per_group: int, passes: int) -> None:
    heads = groups * per_group
    for units in (1, 10, 100, 1000):
        work = plan.work_for(heads, groups, units, passes, plan.PROGRAMS)
        blocks, rest = divmod(heads, work.heads_a_block)
        assert rest == 0
        assert per_group % work.heads_a_block == 0, "heads of one group a program"
        count, rest = divmod(blocks, work.blocks_a_pass)
        assert rest == 0
        assert count >= min(passes, heads)
        a_pass = work.heads_a_block * work.blocks_a_pass
        assert a_pass % per_group == 0 or per_group % a_pass == 0, "whole groups, or an equal part of one"
        larger = [n for n in range(work.heads_a_block + 1, per_group + 1) if per_group % n == 0 and a_pass % n == 0]
        assert all(units * a_pass // n < plan.PROGRAMS for n in larger), "a program has as many heads as fill the card"


def test_more_programs_forward_than_backward() -> None:
    k, v = torch.empty(1, 128 * 64, 1, 128), torch.empty(1, 128 * 64, 48, 64)
    blocks = [sizes.sizes_of(k, v, None, None, 0, more=False, backward=backward).blocks for backward in (False, True)]
    assert blocks[0] > blocks[1]


@pytest.mark.parametrize(("G", "H"), [(1, 12), (2, 12), (4, 4)])
def test_programs_of_a_pass_share_no_place(G: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over heads of a group go to one of some places each: programs that may run at once never to the same."""
    k, v = torch.empty(1, 500, G, 16), torch.empty(1, 500, H, 16)
    for scratch in (1e-9, 0.3, 2.0):
        change(monkeypatch, SCRATCH=scratch, SCRATCH_BYTES=1)
        for heads_a_program in (1, 3):
            change(monkeypatch, PROGRAMS=plan.PROGRAMS // heads_a_program**2)
            made = sizes.sizes_of(k, v, None, None, 0, more=False, backward=True)
            of_group = H // G // made.block_heads
            for first in range(0, made.blocks, made.blocks_a_pass):
                blocks = range(first, first + made.blocks_a_pass)
                places = [(block // of_group, block % of_group % made.partials) for block in blocks]
                assert len(set(places)) == len(places)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans_of_the_delta_rule(dtype: torch.dtype, stateful: bool) -> None:
    """States are handed over at the ends of chunks: with them a tile is one."""
    for K in range(16, 257, 16):
        for V in range(16, 513, 16):
            made = delta_sizes.plan_for(dtype, K, V, stateful)
            given = delta_sizes.Sizes(dtype, 1, 500, 1, K, 1, V, 9, None, 0, stateful, False, True).given
            for block in (given["BK"], given["BV"], given["KB"]):
                assert block.bit_count() == 1
                assert block * dtype.itemsize >= 128, "tensor cores read no less of a row"
            assert (given["BK"], given["BV"], given["P"]) == (made.key_block, made.value_block, made.pair)
            assert K <= made.key_block < max(128, 2 * K)
            assert given["KB"] <= made.key_block
            assert made.precision == ("tf32x3" if dtype == torch.float32 else "tf32")
            assert made.pair == (dtype == torch.bfloat16 and not stateful)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plans(dtype: torch.dtype) -> None:
    for K in range(16, 257, 16):
        for V in range(16, 513, 16):
            made = plan.plan_for(dtype, K, V)
            for block, size in ((made.key_block, K), (made.value_block, V)):
                assert block.bit_count() == 1
                assert block * dtype.itemsize >= 128, "tensor cores read no less of a row"
                assert block < max(128, 2 * size)
            assert made.key_block >= K
            assert made.precision == ("tf32x3" if dtype == torch.float32 else "tf32")
            assert made.pair == (dtype == torch.bfloat16 and K <= 128)
            assert (made.tile, 1 << made.tile_bits) == (64 << made.pair, 64 << made.pair)


@pytest.mark.parametrize("two", [0, 1])
@pytest.mark.parametrize("continued", [False, True])
def test_room_for_every_tile(two: int, continued: bool, seed: int) -> None:
    """Sizes come from the number of tokens and documents alone; documents may end and begin anywhere."""
    tile = 64 << two
    for _ in range(200):
        N = int(torch.randint(1, 9, ()))
        length = torch.randint(0, 300, (N,)) * (torch.rand(N) < 0.8)
        length[0] += 1
        chunk0 = torch.randint(0, 9, (N,)) * continued
        most = int(chunk0.max())
        # Documents of calls that continue others are padded to whole chunks.
        slots = (length + 63) // 64 * 64 if continued else length
        start = slots.cumsum(0) - slots
        chosen = plan.Plan(two, 16, 16, "tf32x3")
        layout = plan.layout_for(1, int(slots.sum()), N, most, chosen)
        first = plan.first_tiles(torch.stack([start, length, chunk0]), chosen)
        begin, end = chunk0 * 64, chunk0 * 64 + length
        counts = torch.where(length > 0, (end + tile - 1) // tile - begin // tile, 0)
        assert first.tolist() == [0, *counts.cumsum(0).tolist()]
        assert first[-1] <= layout.tiles
        assert int((end // tile).max()).bit_length() <= layout.tree_levels


@pytest.mark.parametrize(("two", "continued"), [(0, False), (0, True), (1, False)])
def test_places_of_what_tiles_of_the_delta_rule_see(
    two: int, continued: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each set bit of a tile's number, documents behind each other; and every right child has a program."""
    change(monkeypatch, plan_for=lambda *_: plan.Plan(two, 16, 16, "tf32x3"))
    for _ in range(100):
        N = int(torch.randint(1, 9, ()))
        length = torch.randint(0, 700, (N,)) * (torch.rand(N) < 0.8)
        length[0] += 1
        chunk0 = torch.randint(0, 9, (N,)) * continued
        slots = (length + 63) // 64 * 64 if continued else length
        start = slots.cumsum(0) - slots
        documents = torch.stack([start, length, chunk0])
        T, most = int(slots.sum()), int(chunk0.max())
        made = delta_sizes.Sizes(torch.float32, 1, T, 1, 16, 1, 16, 9, N, most, continued, continued, False)
        children_first, seen_first = delta_sizes.tree_tables(documents, made)
        tile = 64 << two
        tile0 = (chunk0 >> two).tolist()
        end = [int(a * 64 + b) for a, b in zip(chunk0, length, strict=True)]
        limit = [-(-e // tile) if n else t for e, n, t in zip(end, length.tolist(), tile0, strict=True)]
        seen = [sum(A.bit_count() for A in range(*pair)) for pair in zip(tile0, limit, strict=True)]
        assert seen_first.tolist() == [sum(seen[:n]) for n in range(N)]
        assert sum(seen) <= made.slots
        # Of tiles of one chunk, also those that begin where the document ends: states may be asked for.
        stop = limit if two else [max(h, e // tile + 1) for h, e in zip(limit, end, strict=True)]
        tiles = [range(*pair) for pair in zip(tile0, stop, strict=True)]
        for level in range(made.layout.tree_levels):
            counts = [len({A >> level for A in of if A >> level & 1}) for of in tiles]
            assert children_first[level].tolist() == [sum(counts[:n]) for n in range(N + 1)]
        counts = [len({A >> delta_sizes.LOWEST for A in of}) for of in tiles]
        assert children_first[-1].tolist() == [sum(counts[:n]) for n in range(N + 1)]
        for level, _, programs in made.steps:
            assert int(children_first[level, -1]) <= programs
