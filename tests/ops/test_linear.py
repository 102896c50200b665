"""The four recurrent operators: three forms agree, on outputs and on every gradient."""

import itertools
import random

import pytest
import torch

from src.ops.reference import parallel, recurrent
from tests.ops.helpers import (
    FAMILIES,
    LOGLINEAR,
    assert_close,
    assert_same_with_gradients,
    inputs,
    leaves,
    operator,
    part,
    relative_error,
)

LENGTHS = [*range(1, 18), 63, 64, 65, 127, 129, 500, 777]


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_is_parallel(family: str, T: int, seed: int) -> None:
    arguments = inputs(family, T, B=2)
    tensors = leaves(arguments)
    o, _ = operator(family)(**arguments, scale=0.5)
    assert_same_with_gradients(o, parallel(**arguments, scale=0.5), tensors, 1e-10)


@pytest.mark.parametrize("T", [1, 2, 13, 65, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_recurrent_is_parallel(family: str, T: int, seed: int) -> None:
    arguments = inputs(family, T, B=2, H=4, G=2)
    tensors = leaves(arguments)
    o, _ = recurrent(**arguments)
    assert_same_with_gradients(o, parallel(**arguments), tensors, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("T", [1000, 1024, 2049, 4097])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_is_parallel_when_long(family: str, T: int, seed: int) -> None:
    arguments = inputs(family, T, decay=0.01, H=1)
    tensors = leaves(arguments)
    o, _ = operator(family)(**arguments)
    assert_same_with_gradients(o, parallel(**arguments), tensors, 1e-10)


@pytest.mark.parametrize(("G", "H"), [(1, 1), (1, 4), (2, 4), (3, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_groups_serve_consecutive_heads(family: str, G: int, H: int, seed: int) -> None:
    arguments = inputs(family, 130, G=G, H=H)
    tensors = leaves(arguments)
    o, _ = operator(family)(**arguments)
    assert_same_with_gradients(o, parallel(**arguments), tensors, 1e-10)
    wide = dict(arguments)
    for name in ("q", "k"):
        wide[name] = torch.stack([arguments[name][:, :, h * G // H] for h in range(H)], 2)
    assert_close(operator(family)(**wide)[0], o, 1e-12, "repeated groups")


@pytest.mark.parametrize(("K", "V"), [(16, 64), (48, 16), (80, 32), (256, 512)])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_dims(family: str, K: int, V: int, seed: int) -> None:
    arguments = inputs(family, 70, K=K, V=V, H=1)
    tensors = leaves(arguments)
    o, _ = operator(family)(**arguments)
    assert_same_with_gradients(o, parallel(**arguments), tensors, 1e-10)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_precision(family: str, dtype: torch.dtype, bound: float, seed: int) -> None:
    """Against fp64 on the same rounded inputs. The decay and the scales stay fp32, as mixers pass them."""
    arguments = inputs(family, 300, dtype=torch.float32)
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].to(dtype)
    tensors = leaves(arguments)
    exact = {name: None if x is None else x.detach().double() for name, x in arguments.items()}
    exact_tensors = leaves(exact)
    o, _ = operator(family)(**arguments)
    assert o.dtype == dtype
    assert_same_with_gradients(o, parallel(**exact), tensors, bound, exact_tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_does_not_reach_inside(family: str, seed: int) -> None:
    arguments = inputs(family, 200, dtype=torch.float32)
    plain, _ = operator(family)(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        under, _ = operator(family)(**arguments)
    assert torch.equal(plain, under)


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic(family: str, seed: int) -> None:
    arguments = inputs(family, 300, B=2, dtype=torch.float32)
    tensors = leaves(arguments)
    runs = []
    for _ in range(2):
        o, _ = operator(family)(**arguments)
        runs.append([o, *torch.autograd.grad(o.square().sum(), list(tensors.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("family", LOGLINEAR)
def test_scales_of_one_give_the_linear_model(family: str, seed: int) -> None:
    arguments = inputs(family, 777)
    arguments["level_scales"] = torch.ones_like(arguments["level_scales"])
    base = {**arguments, "level_scales": None}
    tensors = leaves(base)
    o, _ = operator(family)(**arguments)
    linear, _ = operator(family.removeprefix("loglinear_"))(**base)
    assert_same_with_gradients(o, linear, tensors, 1e-10)


@pytest.mark.parametrize("L", [1, 3, 7, 8])
@pytest.mark.parametrize("family", LOGLINEAR)
def test_last_scale_serves_all_higher_levels(family: str, L: int, seed: int) -> None:
    arguments = inputs(family, 600, L=L)
    tensors = leaves(arguments)
    o, _ = operator(family)(**arguments)
    scales = arguments["level_scales"]
    enough = torch.cat([scales, scales[..., -1:].expand(*scales.shape[:-1], 11 - L)], -1)
    assert_same_with_gradients(o, parallel(**{**arguments, "level_scales": enough}), tensors, 1e-10)


# Values that break careless code.


@pytest.mark.parametrize("decay", [0.0, 10.0, 400.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_decay_and_strong_decay(family: str, decay: float, seed: int) -> None:
    """Mean log decay per step 0, -10 and -400, with some steps of 0 mixed in."""
    arguments = inputs(family, 200, decay=decay)
    arguments["g"] = torch.where(torch.rand_like(arguments["g"]) < 0.2, 0.0, arguments["g"])
    tensors = leaves(arguments)
    o, _ = operator(family)(**arguments)
    assert_same_with_gradients(o, parallel(**arguments), tensors, 1e-9)
    rounded = {name: None if x is None else x.detach().float() for name, x in arguments.items()}
    single = leaves(rounded)
    o32, _ = operator(family)(**rounded)
    weight = torch.randn_like(o)
    grads = torch.autograd.grad(o32, list(single.values()), weight.float())
    exact = torch.autograd.grad(operator(family)(**arguments)[0], list(tensors.values()), weight)
    assert all(x.isfinite().all() for x in (o32, *grads))
    # Sums of g over a chunk are fp32, so an exponent is wrong by up to an ulp of the largest sum.
    assert relative_error(o32, o) < 1e-5 + 64 * 2 * decay * 2**-24
    for name, a, b in zip(tensors, grads, exact, strict=True):
        if decay <= 10:  # at -400 a step the gradient of g is e^-400
            assert_close(a, b, 1e-4, f"gradient of {name} in fp32")


@pytest.mark.parametrize("family", [f for f in FAMILIES if "delta" in f])
def test_identical_keys_at_full_strength(family: str, seed: int) -> None:
    """The inverse of an all-ones triangle: exact only if it is not computed through powers."""
    arguments = inputs(family, 200, dtype=torch.float32)
    arguments["k"] = arguments["k"][:, :1].expand_as(arguments["k"]).contiguous()
    arguments["beta"] = torch.ones_like(arguments["beta"])
    exact = {name: None if x is None else x.double() for name, x in arguments.items()}
    tensors, exact_tensors = leaves(arguments), leaves(exact)
    o, _ = operator(family)(**arguments)
    # Each write erases all that is older, so no decay has an effect: that gradient is 0, held absolutely.
    assert torch.autograd.grad(o.sum(), tensors.pop("g"), retain_graph=True)[0].abs().max() < 1e-4
    del exact_tensors["g"]
    assert_same_with_gradients(o, parallel(**exact), tensors, 1e-5, exact_tensors)


@pytest.mark.parametrize("family", [f for f in FAMILIES if "delta" in f])
def test_no_write(family: str, seed: int) -> None:
    arguments = inputs(family, 100)
    arguments["beta"] = torch.zeros_like(arguments["beta"])
    o, _ = operator(family)(**arguments)
    assert torch.equal(o, torch.zeros_like(o))


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_nothing_behind_its_inputs(family: str, seed: int) -> None:
    """Inputs are views into memory full of NaN."""
    arguments = inputs(family, 70)
    guarded = {}
    for name, x in arguments.items():
        if x is not None:
            field = torch.full((x.shape[0], x.shape[1] + 200, *x.shape[2:]), torch.nan, dtype=x.dtype)
            field[:, 100:170] = x
            x = field[:, 100:170]
        guarded[name] = x
    tensors = leaves(guarded)
    o, _ = operator(family)(**guarded)
    assert_same_with_gradients(o, parallel(**guarded), tensors, 1e-10)


# Packing and states.

CUTS = [
    [0, 0, 5, 5, 70],
    [0, 1, 2, 66, 130, 131, 259, 259],
    [0, 300],
    [0, 64, 128, 143, 400, 400, 400, 465],
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_are_separate(family: str, cuts: list[int], dtype: torch.dtype, seed: int) -> None:
    arguments = inputs(family, cuts[-1], L=5)
    tensors = leaves(arguments)
    o, state = operator(family)(**arguments, cu_seqlens=torch.tensor(cuts, dtype=dtype), return_state=True)
    pieces = [parallel(**part(arguments, a, b)) for a, b in zip(cuts[:-1], cuts[1:], strict=True) if b > a]
    assert_same_with_gradients(o, torch.cat(pieces, 1), tensors, 1e-10)
    assert state.positions.tolist() == torch.tensor(cuts).diff().tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_cannot_reach_another(family: str, seed: int) -> None:
    cu = torch.tensor([0, 40, 40, 150, 300])
    arguments = inputs(family, 300)
    for x in arguments.values():
        if x is not None:
            x[:, 40:150] = torch.nan
    arguments = {name: x if x is None else x.requires_grad_() for name, x in arguments.items()}
    o, _ = operator(family)(**arguments, cu_seqlens=cu)
    keep = torch.ones(300, dtype=torch.bool)
    keep[40:150] = False
    assert o[:, keep].isfinite().all()
    grads = torch.autograd.grad(o[:, keep].sum(), [x for x in arguments.values() if x is not None])
    assert all(x[:, keep].isfinite().all() for x in grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_split_into_calls(family: str, seed: int) -> None:
    T = 420
    arguments = inputs(family, T, B=2, decay=0.02)
    tensors = leaves(arguments)
    whole = parallel(**arguments)
    cuts = sorted({0, T, 64, 65, 70, 71, 128, *random.sample(range(1, T), 5)})
    print("cuts", cuts)
    state, pieces = None, []
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        o, state = operator(family)(**part(arguments, a, b), initial_state=state, return_state=True)
        pieces.append(o)
    assert_same_with_gradients(torch.cat(pieces, 1), whole, tensors, 1e-10)
    assert state.positions.tolist() == [T, T]


@pytest.mark.parametrize("n", [1, 63, 64, 65, 70, 127, 128, 129, 1000])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_then_decode(family: str, n: int, seed: int) -> None:
    steps = 70 if n == 1 else 3
    arguments = inputs(family, n + steps, decay=0.01, dtype=torch.float32)
    whole, _ = operator(family)(**arguments)
    _, state = operator(family)(**part(arguments, 0, n), return_state=True)
    for t in range(n, n + steps):
        o, state = operator(family)(**part(arguments, t, t + 1), initial_state=state, return_state=True)
        assert_close(o, whole[:, t : t + 1], 2e-5, f"token {t}")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_prefill_then_decode(family: str, seed: int) -> None:
    """Documents of all the awkward lengths in one prefill, then three tokens each, as rows of a batch."""
    lengths = torch.tensor([1, 63, 64, 0, 65, 70, 127, 128, 129, 1000])
    cuts = [0, *lengths.cumsum(0).tolist()]
    arguments = inputs(family, cuts[-1], L=11, H=1)
    more = inputs(family, 3, B=len(lengths), L=11, H=1)
    _, state = operator(family)(**arguments, cu_seqlens=torch.tensor(cuts), return_state=True)
    outputs = []
    for t in range(3):
        o, state = operator(family)(**part(more, t, t + 1), initial_state=state, return_state=True)
        outputs.append(o)
    assert state.positions.tolist() == (lengths + 3).tolist()
    for n, (a, b) in enumerate(itertools.pairwise(cuts)):
        given = {name: x for name, x in arguments.items() if x is not None}
        row = {name: torch.cat([x[:, a:b], more[name][n : n + 1]], 1) for name, x in given.items()}
        whole, _ = operator(family)(**row)
        assert_close(torch.cat(outputs, 1)[n : n + 1], whole[:, b - a :], 1e-10, f"document of {b - a}")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_sequence_is_its_pieces(family: str, seed: int) -> None:
    T = 131_072
    arguments = inputs(family, T, H=1, decay=1e-4, dtype=torch.float32)
    with torch.no_grad():
        whole, _ = operator(family)(**arguments)
        state, at = None, 0
        for size in (1, 50_000, 15_535, 65_536):
            o, state = operator(family)(**part(arguments, at, at + size), initial_state=state, return_state=True)
            assert_close(o, whole[:, at : at + size], 1e-4, f"tokens from {at}")
            at += size
    assert at == T


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_dtypes(family: str, seed: int) -> None:
    """bf16 inputs with fp32 or bf16 gates, continued from a state that was moved to another dtype."""
    exact = inputs(family, 150, dtype=torch.float32)
    rounded = {name: None if x is None else x.bfloat16() for name, x in exact.items()}
    expected = parallel(**{name: None if x is None else x.double() for name, x in rounded.items()})
    for dtype in (None, torch.float64, torch.bfloat16):
        first, state = operator(family)(**part(rounded, 0, 100), return_state=True)
        state = state if dtype is None else state.to(dtype)
        second, _ = operator(family)(**part(rounded, 100, 150), initial_state=state)
        assert second.dtype == torch.bfloat16
        assert_close(torch.cat([first, second], 1), expected, 2e-2, f"state in {dtype}")
    if exact["level_scales"] is not None:
        o, _ = operator(family)(**{**exact, "level_scales": exact["level_scales"].double()})
        assert torch.equal(o, operator(family)(**exact)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_at_different_positions(family: str, seed: int) -> None:
    """Prefill three packed documents, select and reset rows, continue dense; the recurrent form alike."""
    cu = torch.tensor([0, 70, 70, 261])
    arguments = inputs(family, 261)
    _, state = operator(family)(**arguments, cu_seqlens=cu, return_state=True)
    _, slow = recurrent(**arguments, cu_seqlens=cu, return_state=True)
    state, slow = (s.select([2, 0, 1, 2]).reset([3]) for s in (state, slow))
    assert state.positions.tolist() == [191, 70, 0, 0]
    more = inputs(family, 80, B=4, L=9)
    o, end = operator(family)(**more, initial_state=state, return_state=True)
    expected, slow_end = recurrent(**more, initial_state=slow, return_state=True)
    assert_close(o, expected, 1e-10, "output")
    assert end.num_bytes == slow_end.num_bytes
    fresh, _ = operator(family)(**{name: None if x is None else x[2:] for name, x in more.items()})
    assert_close(o[2:], fresh, 1e-10, "rows at 0")
    cu = torch.tensor([0, 3, 3, 70, 80])
    row = {name: None if x is None else x[:1] for name, x in more.items()}
    o, _ = operator(family)(**row, initial_state=end, cu_seqlens=cu)
    expected, _ = recurrent(**row, initial_state=slow_end, cu_seqlens=cu)
    assert_close(o, expected, 1e-10, "packed continuation")


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_through_the_state(family: str, seed: int) -> None:
    first, second = inputs(family, 150), inputs(family, 100, L=9)
    tensors = leaves(first)
    _, state = operator(family)(**first, return_state=True)
    o, _ = operator(family)(**second, initial_state=state)
    _, slow = recurrent(**first, return_state=True)
    expected, _ = recurrent(**second, initial_state=slow)
    del tensors["q"]
    tensors.pop("level_scales", None)
    assert_same_with_gradients(o, expected, tensors, 1e-10)
    o, _ = operator(family)(**second, initial_state=state.detach())
    assert not o.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_changed_in_place(family: str, seed: int) -> None:
    arguments = inputs(family, 100)
    _, state = operator(family)(**arguments, return_state=True)
    copy = state.clone()
    first, _ = operator(family)(**arguments, initial_state=state)
    second, _ = operator(family)(**arguments, initial_state=state)
    assert torch.equal(first, second)
    third, _ = operator(family)(**arguments, initial_state=copy)
    assert torch.equal(first, third)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_of_a_sequence_shorter_than_a_chunk(family: str, seed: int) -> None:
    arguments = inputs(family, 9, L=4)
    whole, _ = operator(family)(**arguments)
    _, state = operator(family)(**part(arguments, 0, 5), return_state=True)
    o, _ = operator(family)(**part(arguments, 5, 9), initial_state=state)
    assert_close(o, whole[:, 5:], 1e-12, "output")


@pytest.mark.parametrize("family", LOGLINEAR)
def test_state_is_logarithmic(family: str, seed: int) -> None:
    for T in (64, 1000, 4096, 16383):
        arguments = inputs(family, T, H=1, dtype=torch.float32)
        _, state = operator(family)(**arguments, return_state=True)
        matrices, tokens = (T // 64).bit_count(), T % 64
        per_token = 4 * (16 + 16 + 1 + ("delta" in family))
        assert state.num_bytes == matrices * 16 * 16 * 4 + tokens * per_token
        assert state.num_bytes <= state.capacity_bytes <= 8 * 16 * 16 * 4 + 63 * per_token


# Compilation and errors.


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_whole(family: str, packed: bool, seed: int) -> None:
    """Padded tables in place of sizes read from tensors; three packings, one graph."""
    torch._dynamo.reset()
    arguments = inputs(family, 300)
    tensors = leaves(arguments)
    compiled = torch.compile(operator(family), fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cuts in ([0, 70, 70, 300], [0, 1, 2, 300], [0, 128, 256, 300]):
            cu = torch.tensor(cuts) if packed else None
            o, _ = compiled(**arguments, cu_seqlens=cu)
            expected, _ = operator(family)(**arguments, cu_seqlens=cu)
            assert_same_with_gradients(o, expected, tensors, 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 5, 3, 16)}, "groups G that divides the heads H=2 of v, got G=3"),
        ({"k": torch.zeros(1, 5, 1, 32)}, r"k must have shape .*K=16\], got \[1, 5, 1, 32\]"),
        ({"g": torch.zeros(1, 4, 2)}, r"g must have shape \[B=1, T=5, H=2\], got \[1, 4, 2\]"),
        ({"level_scales": torch.zeros(1, 5, 2, 0)}, "at least one level, got L=0"),
        ({"v": torch.zeros(1, 5, 2, 16, dtype=torch.int64)}, "v must be one of float32, bfloat16, float64"),
        ({"q": torch.zeros(1, 5, 1, 16, dtype=torch.bfloat16)}, "q must have the dtype of v"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 5])}, "never fall"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "from 0 to T=5"),
        ({"cu_seqlens": torch.tensor([0.0, 5.0])}, "int32 or int64"),
        ({"backend": "cuda"}, "backend must be one of auto, torch, triton"),
        ({"backend": "triton"}, "no kernel for this operator"),
        ({"initial_state": 3}, "initial_state must be a LogLinearState, got int"),
    ],
)
def test_errors_name_the_argument(change: dict, message: str) -> None:
    arguments = inputs("loglinear_ssd", 5, dtype=torch.float32)
    if "q" in change and change["q"].shape[2] == 3:
        change = {**change, "k": change["q"]}
    with pytest.raises(ValueError, match=message) as error:
        operator("loglinear_ssd")(**{**arguments, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("K", "V", "name"), [(8, 16, "K=8"), (272, 16, "K=272"), (16, 24, "V=24"), (16, 528, "V=528")])
def test_head_dims_outside_the_contract(K: int, V: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        operator("ssd")(**inputs("ssd", 5, K=K, V=V))


def test_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, got T=0"):
        operator("ssd")(**inputs("ssd", 0))
