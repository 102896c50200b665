"""Every place that a program of the kernels reads or writes, asked of Triton's interpreter."""

import numpy as np
import pytest
import torch
from torch import Tensor

from src.ops.kernels import launch, passes
from src.ops.kernels.delta import passes as delta_passes
from tests.ops.helpers import inputs, leaves, operator
from tests.ops.kernels import (
    DELTA,
    DEVICE,
    LINEAR_ONCE,
    ONE_KIND,
    SCALE,
    both,
    change,
    deal,
    in_nan,
    matrices,
    plan_of,
    run,
)

pytestmark = [
    pytest.mark.usefixtures("pair", "poisoned"),
    pytest.mark.skipif(not launch.INTERPRETED, reason="only the interpreter can be asked for addresses"),
]

READ_ONLY = {"q", "k", "v", "g", "beta", "scales", "do", "documents", "first", "children_first", "seen_first"}
READ_ONLY |= {"roots", "dlevels", "initial", "dhalf"}


class Watch:
    """Of each launch: places outside of the tensors that it was given, and places where its programs meet.

    Programs of one launch run at the same time, in any order: where one writes, no other may read or write.
    """

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.kernel = ""

    def begin(self, kernel, arguments: dict) -> None:
        given = {name: arguments[name] for name in kernel.arg_names if isinstance(arguments[name], Tensor)}
        ends = {name: (x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in given.items()}
        self.kernel = kernel.__name__
        self.readable = np.array(sorted(ends.values()), np.uint64)
        self.writable = np.array(sorted(e for name, e in ends.items() if name not in READ_ONLY), np.uint64)
        self.loads: list[tuple[np.ndarray, int]] = []
        self.stores: list[tuple[np.ndarray, int]] = []

    def at(self, action: str, program: int, pointers, mask) -> None:
        size = np.uint64(max(8, pointers.get_element_ty().primitive_bitwidth) // 8)
        places, there = np.broadcast_arrays(np.asarray(pointers.data), np.asarray(mask.data))
        places = places[there.astype(bool)].astype(np.uint64)
        if not _inside(places, size, self.readable if action == "load" else self.writable).all():
            self.found.add(f"{self.kernel}: a {action} outside")
        if action == "load":  # what nobody may write cannot be met at
            places = places[_inside(places, size, self.writable)]
        (self.loads if action == "load" else self.stores).append((places, program))

    def end(self) -> None:
        places, programs = _flat(self.stores)
        order = np.lexsort((programs, places))
        places, programs = places[order], programs[order]
        if ((places[1:] == places[:-1]) & (programs[1:] != programs[:-1])).any():
            self.found.add(f"{self.kernel}: two programs write to one place")
        read, readers = _flat(self.loads)
        if len(places) and len(read):
            at = np.searchsorted(places, read).clip(max=len(places) - 1)
            if ((places[at] == read) & (programs[at] != readers)).any():
                self.found.add(f"{self.kernel}: a program reads where another one writes")


def _inside(places: np.ndarray, size: np.uint64, regions: np.ndarray) -> np.ndarray:
    region = np.searchsorted(regions[:, 0], places, side="right") - 1
    return (region >= 0) & (places + size <= regions[region, 1])


def _flat(seen: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray]:
    places = [places for places, _ in seen] or [np.zeros(0, np.uint64)]
    programs = [np.full(len(places), program) for places, program in seen] or [np.zeros(0, int)]
    return np.concatenate(places), np.concatenate(programs)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    from triton.runtime.interpreter import InterpreterBuilder

    made = Watch()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_load(self, pointers, mask, *rest):
        made.at("load", self.grid_idx[0], pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        made.at("store", self.grid_idx[0], pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def watched_launch(kernel, programs: int, arguments: dict, **options) -> None:
        made.begin(kernel, arguments)
        launch.launch(kernel, programs, arguments, **options)
        made.end()

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
    change(monkeypatch, launch=watched_launch)
    return made


@LINEAR_ONCE
def test_documents_and_states(family: str, pair: int, watch: Watch, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continued, so that documents begin and end in the middle of tiles. Head dims fill none of their blocks."""
    plan_of(monkeypatch, pair, 32)
    tile, state, loss = 64 << pair, None, 0.0
    for cuts in ([0, 0, tile, 2 * tile + 6, 2 * tile + 7], [0, 1, 7, 70, 70]):
        given, _ = both(inputs(family, cuts[-1], H=1, K=48, V=48, L=9))
        given = {name: None if x is None else in_nan(x).requires_grad_() for name, x in given.items()}
        o, state = operator(family)(
            **given,
            scale=SCALE,
            cu_seqlens=torch.tensor(cuts, device=DEVICE),
            initial_state=state,
            return_state=True,
            backend="triton",
        )
        loss = loss + o.sum()
    (loss + matrices(state).sum()).backward()
    assert not watch.found


@ONE_KIND
@pytest.mark.parametrize(("K", "cuts"), [(48, None), (48, [0, 0, 1, 129, 290, 290]), (144, [0, 70, 210])])
@pytest.mark.parametrize("family", DELTA)
def test_without_states(
    family: str, K: int, cuts: list[int] | None, watch: Watch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of two chunks, which the delta rule takes only here; rows of a batch and packed documents."""
    plan_of(monkeypatch, 1, 32)
    sizes = {"B": 2, "T": 270} if cuts is None else {"T": cuts[-1]}
    given, _ = both(inputs(family, **sizes, H=1, K=K, V=48, L=9))
    given = {name: None if x is None else in_nan(x).requires_grad_() for name, x in given.items()}
    run(family, given, cu_seqlens=None if cuts is None else torch.tensor(cuts, device=DEVICE)).sum().backward()
    assert not watch.found


@ONE_KIND
@pytest.mark.parametrize(
    ("family", "dealt"),
    [
        ("ssd", (1, None)),
        ("loglinear_ssd", (1, 2)),
        ("gated_delta_rule", (1, 2)),
        ("loglinear_gated_delta_rule", (1, None)),
    ],
)
def test_heads_of_a_group(
    family: str, dealt: tuple[int, int | None], watch: Watch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one pass, two in each of two, of the delta rule one in each of four."""
    deal(monkeypatch, *dealt)
    given, _ = both(inputs(family, 140, H=4))
    leaves(given)
    run(family, given).sum().backward()
    assert not watch.found


OUTSIDE = {"ssd": {"prepare: a store outside", "output: a load outside"}}
OUTSIDE["gated_delta_rule"] = OUTSIDE["ssd"] | {"solve: a store outside"}
OUTSIDE["gated_delta_rule"] |= {"join: a load outside", "join: a store outside"}


@ONE_KIND
@pytest.mark.parametrize("family", OUTSIDE)
def test_the_watch_sees_what_is_outside(family: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of allocations that are said to be an element shorter than they are."""
    module = delta_passes if family in DELTA else passes
    new = module.Pass.new

    def short(self, *shape: int, **options) -> Tensor:
        made = new(self, *shape, **options).view(-1)
        return made[: max(1, len(made) - 1)]

    monkeypatch.setattr(module.Pass, "new", short)
    given, _ = both(inputs(family, 70, H=1))
    run(family, given)
    assert watch.found == OUTSIDE[family]


@ONE_KIND
def test_the_watch_sees_programs_that_meet(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two heads of a group that are given one place for their sums."""
    begin = passes.Pass.__init__

    def together(self, *given) -> None:
        begin(self, *given)
        self.given["partials"] = 1

    deal(monkeypatch, 1)
    monkeypatch.setattr(passes.Pass, "__init__", together)
    given, _ = both(inputs("ssd", 140))
    leaves(given)
    run("ssd", given).sum().backward()
    kernels = {text.split(":")[0] for text in watch.found}
    assert kernels == {"rows", "columns_back", "pairs", "inside"}


@ONE_KIND
@pytest.mark.parametrize("family", DELTA)
def test_the_watch_sees_heads_that_meet(family: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are given one place for the states that their tiles see."""
    begin = delta_passes.Pass.__init__

    def together(self, *given, **options) -> None:
        begin(self, *given, **options)
        self.given["slots"] = 0

    monkeypatch.setattr(delta_passes.Pass, "__init__", together)
    given, _ = both(inputs(family, 140))
    leaves(given)
    run(family, given).sum().backward()
    meet = [text for text in watch.found if text.endswith("two programs write to one place")]
    assert all(any(text.startswith(name) for text in meet) for name in ("follow", "ebb"))
