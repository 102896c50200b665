"""The four recurrent operators: three forms agree, on outputs and on every gradient."""

from contextlib import nullcontext

import pytest
import torch

from src import ops
from src.ops.reference import parallel, recurrent
from tests.ops.helpers import (
    FAMILIES,
    LOGLINEAR,
    assert_close,
    assert_same_with_gradients,
    inputs,
    leaves,
    operator,
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
        ({"initial_state": 3}, "initial_state must be a LogLinearState, got int"),
        ({"v": torch.zeros(0, 5, 2, 16)}, "v must have at least one row, got B=0"),
    ],
)
def test_errors_name_the_argument(change: dict, message: str) -> None:
    arguments = inputs("loglinear_ssd", 5, dtype=torch.float32)
    if "q" in change and change["q"].shape[2] == 3:
        change = {**change, "k": change["q"]}
    with pytest.raises(ValueError, match=message) as error:
        operator("loglinear_ssd")(**{**arguments, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "dtype", "message"),
    [
        ("ssd", torch.float64, "takes float32 and bfloat16, got float64"),
        ("loglinear_ssd", torch.float32, "needs a CUDA device .* got cpu"),
        ("loglinear_gated_delta_rule", torch.float32, "needs a CUDA device .* got cpu"),
        ("ssd", torch.bfloat16, "needs the package triton"),
        ("loglinear_ssd", torch.bfloat16, "interprets float32 only"),
        ("ssd", torch.float32, "has no forward-mode derivatives"),
    ],
)
def test_triton_says_what_it_cannot_take(
    family: str, dtype: torch.dtype, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls go to PyTorch where the backend is left open."""
    monkeypatch.setenv("TRITON_INTERPRET", "1" if "interprets" in message else "0")
    if "package" in message:
        monkeypatch.setattr("src.ops.linear.HAS_TRITON", False)
    arguments = inputs(family, 5, dtype=dtype)
    with torch.autograd.forward_ad.dual_level() if "forward" in message else nullcontext():
        with pytest.raises(ValueError, match=f"^backend='triton' .*{message}.*; use 'torch' or 'auto'$") as error:
            operator(family)(**arguments, backend="triton")
        assert "\n" not in str(error.value)
        assert torch.equal(operator(family)(**arguments)[0], operator(family)(**arguments, backend="torch")[0])


@pytest.mark.parametrize(("K", "V", "name"), [(8, 16, "K=8"), (272, 16, "K=272"), (16, 24, "V=24"), (16, 528, "V=528")])
def test_head_dims_outside_the_contract(K: int, V: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        operator("ssd")(**inputs("ssd", 5, K=K, V=V))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gated_delta_rule", "beta"),
        ("loglinear_ssd", "level_scales"),
        ("loglinear_gated_delta_rule", "beta"),
        ("loglinear_gated_delta_rule", "level_scales"),
    ],
)
def test_no_operator_turns_into_another(name: str, missing: str) -> None:
    arguments = {n: x for n, x in inputs(name, 5).items() if x is not None}
    with pytest.raises(ValueError, match=f"^{missing} must be a tensor, got None$"):
        getattr(ops, name)(**{**arguments, missing: None})


def test_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, got T=0"):
        operator("ssd")(**inputs("ssd", 0))
