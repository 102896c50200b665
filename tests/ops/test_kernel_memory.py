"""What the kernels of ``ssd`` and ``loglinear_ssd`` read, write and keep, and how they are dealt out."""

import pytest
import torch
from torch import Tensor

from src.ops.kernels import plan, sizes, ssd
from tests.ops.helpers import inputs, leaves
from tests.ops.kernels import (
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
    ],
)
def test_several_passes_over_heads(
    family: str, G: int, H: int, dealt: tuple[int, int] | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head each, of whole groups, and of parts of one, whose sums then go to the same place."""
    taken = []
    little_scratch(monkeypatch)
    if dealt:
        deal(monkeypatch, *dealt)
    monkeypatch.setattr(ssd, "Pass", lambda *given, make=ssd.Pass: taken.append(given[3]) or make(*given))
    assert_exact(family, inputs(family, 140, G=G, H=H))
    assert taken[1:] == ([dealt[1]] * 2 if dealt else [1] * H)


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
