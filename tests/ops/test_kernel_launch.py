"""Kernels are launched as what they were compiled for, and compiled side by side before that."""

import contextlib
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from src.ops import KernelError
from src.ops.kernels import check, launch
from tests.ops.helpers import inputs, leaves, operator
from tests.ops.kernels import (
    FAMILIES,
    OF_DECAY,
    OF_DELTA,
    ONE_KIND,
    both,
    change,
    full_name,
    kernel_names,
    matrices,
    run,
    unspecialised,
)


class Kernel:
    """Stands in for a compiled one: what it was compiled for and run with."""

    arg_names: tuple[str, ...] = ("x", "y", "n", "SIZE")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "SIZE") for name in arg_names)

    def __init__(self) -> None:
        self.compiled: list[tuple] = []
        self.ran: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Callable:
        def compile(*arguments, **options):
            self.compiled.append((grid, arguments, options))
            return {(grid[0], 1, 1): lambda *given: self.ran.append((grid, given))}

        return compile


def test_launched_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled anew for other constants, dtypes, alignments, absent tensors; not for other sizes or addresses."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_names", {})  # both go by a kernel's id, which another object may get later
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel, field = Kernel(), torch.zeros(100)
    first = {"x": field, "y": field[:10], "n": 5, "SIZE": 16, "unused": 3}
    how = {"warps": 4, "stages": 2}
    launch.launch(kernel, 7, first, **how)
    assert kernel.compiled == [((7,), (field, first["y"], 5, 16), {"num_warps": 4, "num_stages": 2})]
    launch.launch(kernel, 7, {**first, "x": field[4:], "n": 6}, **how)
    assert len(kernel.compiled) == 1
    assert kernel.ran == [((7,), (field[4:].data_ptr(), field.data_ptr(), 6, 16))]
    for changed in ({"SIZE": 32}, {"x": field.half()}, {"x": field[1:]}, {"y": None}, {"y": field[1:]}):
        count = len(kernel.compiled)
        for _ in range(2):
            launch.launch(kernel, 7, {**first, **changed}, **how, registers=99)
            assert len(kernel.compiled) == count + 1, changed
    assert kernel.compiled[-1][2] == {"num_warps": 4, "num_stages": 2, "maxnreg": 99}
    other = Kernel()
    launch.launch(other, 7, first, **how)
    assert len(other.compiled) == 1


def test_compiled_ahead(monkeypatch: pytest.MonkeyPatch, distrust: set[tuple]) -> None:
    """Every kernel once, loaded at the end of the block, and none is run or trusted; one that does not compile says so
    when it is launched."""

    class Warm(Kernel):
        def __init__(self, fails: bool) -> None:
            super().__init__()
            self.fails = fails
            self.loaded = 0

        def warmup(self, *arguments, grid: tuple, **options) -> SimpleNamespace:
            self.compiled.append((grid, arguments, options))
            return SimpleNamespace(result=lambda ignore_errors: None if self.fails and ignore_errors else self)

        @property
        def run(self) -> None:
            assert threading.current_thread() is threading.main_thread()
            self.loaded += 1

    class Mode(contextlib.nullcontext):
        def __init__(self, pool: object, *, ignore_errors: bool) -> None:
            super().__init__()
            assert ignore_errors

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_names", {})
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(launch.triton, "AsyncCompileMode", Mode)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    right, wrong = Warm(False), Warm(True)
    given = {"x": torch.zeros(100), "y": None, "n": 5, "SIZE": 16}
    with launch.compiling_ahead():
        for kernel in (right, wrong):
            launch.launch(kernel, 7, given, warps=4, stages=2, registers=99)
        check.ensure(("a kind",), lambda: {"output": 9.9}, torch.float32)
    options = {"num_warps": 4, "num_stages": 2, "maxnreg": 99}
    assert right.compiled == wrong.compiled == [((7,), (given["x"], None, 5, 16), options)]
    assert (right.loaded, wrong.loaded, right.ran, distrust) == (1, 0, [], set())
    for _ in range(2):
        launch.launch(right, 7, given, warps=4, stages=2, registers=99)
    assert (len(right.compiled), len(right.ran)) == (2, 1)  # Triton itself finds what it compiled
    with launch.compiling_ahead():
        launch.launch(right, 7, given, warps=4, stages=2, registers=99)
    assert (len(right.compiled), len(right.ran)) == (2, 1)
    with pytest.raises(KernelError):
        check.ensure(("a kind",), lambda: {"output": 9.9}, torch.float32)


def test_an_interrupt_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """In which Triton would hand all later compilations to threads that have ended."""
    active = launch.triton.runtime._async_compile.active_mode

    class Interrupted(contextlib.nullcontext):
        def __init__(self, *_, **options: object) -> None:
            super().__init__()

        def __enter__(self) -> None:
            active.set(self)

        def __exit__(self, *_) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch.triton, "AsyncCompileMode", Interrupted)
    with contextlib.suppress(KeyboardInterrupt), launch.compiling_ahead():
        pass
    assert active.get() is None
    assert not launch.is_compiling_ahead()


def test_compiled_ahead_for_the_device_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the current one."""
    entered: list[str] = []

    @contextlib.contextmanager
    def enter(name: str):
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    problem = check.problem(10, 16, 16, None, torch.float32, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: enter("device") if x is problem["v"] else None)
    monkeypatch.setattr(check, "compiling_ahead", lambda: enter("compiling"))
    check.errors(problem, None, lambda x: x["v"], None)
    assert entered == ["device", "compiling", "end of compiling", "end of device"]


def test_nothing_runs_while_compiling_ahead() -> None:
    """In the interpreter too, so that the self-check is the same there; an error ends it."""
    given = both(inputs("loglinear_gated_delta_rule", 70))[0]
    with launch.compiling_ahead():
        launch.launch(None, 1, {}, warps=4, stages=2)
        with launch.compiling_ahead():
            run("loglinear_gated_delta_rule", given)
        assert launch.is_compiling_ahead()
    with contextlib.suppress(ZeroDivisionError), launch.compiling_ahead():
        raise ZeroDivisionError
    assert not launch.is_compiling_ahead()


@ONE_KIND
@pytest.mark.usefixtures("pair", "poisoned")
def test_no_kernel_is_compiled_for_a_size(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch`` takes a kernel again for other sizes, so Triton must not have made it for 1 or for multiples of 16."""
    launched: dict[str, set[str]] = {}

    def record(kernel, programs: int, arguments: dict, **options) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        constants = {name for name, p in parameters.items() if p.annotation is not inspect.Parameter.empty}
        numbers = {n for n in parameters if n not in constants and isinstance(arguments[n], int | float)}
        general = unspecialised(kernel)
        assert all(isinstance(arguments[n], float) for n in numbers - set(general)), (kernel.__name__, general)
        assert all(n in parameters for n in ("documents", "first", "N", "T"))
        launched.setdefault(full_name(kernel), set()).update(numbers)
        launch.launch(kernel, programs, arguments, **options)

    change(monkeypatch, launch=record)
    for family in FAMILIES:
        given, _ = both(inputs(family, 140, H=1, L=8))
        leaves(given)
        run(family, given).sum().backward()
        state = None
        for _ in range(2):
            given, _ = both(inputs(family, 70, H=1, L=8))
            leaves(given)
            o, state = operator(family)(**given, initial_state=state, return_state=True, backend="triton")
        (o.sum() + matrices(state).sum()).backward()
    assert launched.keys() == kernel_names(*OF_DECAY, *OF_DELTA)
