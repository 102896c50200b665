"""States: what an operator, a mixer or a model remembers between two calls.

All of them hold one entry a row (or packed document), may stand at different positions in different rows, and
offer the same few methods. They are never changed in place, so that one state can be continued twice, except
those that :meth:`State.for_decoding` gave; tensors inside stay in the autograd graph until :meth:`State.detach`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from src.ops.fenwick import CHUNK_SIZE


class State:
    """Base of all states. ``positions [N]`` (int64) counts the tokens that each row has seen."""

    positions: Tensor
    row_axis: ClassVar[dict[str, int]] = {}
    """Axis of the rows in each tensor field; fields that are not named have it first."""
    in_place: bool = False
    """Whether calls may overwrite it: see :meth:`for_decoding`."""

    @property
    def num_bytes(self) -> int:
        """Bytes that carry information now, over all rows. Reads the positions: synchronises on a GPU."""
        raise NotImplementedError

    @property
    def capacity_bytes(self) -> int:
        """Bytes that are allocated, the positions left out."""
        sizes: list[int] = []
        self._map(lambda name, x: sizes.append(0 if name == "positions" else x.nbytes) or x)
        return sum(sizes)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As ``Tensor.to``, on each tensor; a dtype goes to the floating-point ones only."""
        target, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(name: str, x: Tensor) -> Tensor:
            return x.to(target, dtype if x.is_floating_point() else None, non_blocking)

        return (self.clone() if self.in_place else self)._map(move)

    def detach(self) -> Self:
        """Cut the autograd graph: truncated back-propagation."""
        return self._map(lambda name, x: x.detach().clone() if self.in_place else x.detach())

    def clone(self) -> Self:
        return self._map(lambda name, x: x.clone())

    def select(self, rows: Tensor | list[int] | slice) -> Self:
        """The state of some rows, in that order; a row may be taken twice (beam search)."""
        index = self._rows(rows)
        return self._map(lambda name, x: x.index_select(self.row_axis.get(name, 0), index))

    def reset(self, rows: Tensor | list[int] | slice) -> Self:
        """The same state with some rows back at the start of a sequence."""
        keep = torch.ones(len(self.positions), dtype=torch.bool, device=self.positions.device)
        keep = keep.index_fill(0, self._rows(rows), False)

        def clear(name: str, x: Tensor) -> Tensor:
            axis = self.row_axis.get(name, 0)
            shape = [1] * axis + [-1] + [1] * (x.ndim - axis - 1)
            return torch.where(keep.view(shape), x, torch.zeros((), dtype=x.dtype, device=x.device))

        return self._map(clear)

    def for_decoding(self, tokens: int) -> Self:
        """A copy that the next calls may overwrite, with room for ``tokens`` more tokens in every row.

        Single-token calls with the Triton backend then update it in place and return it, without autograd and
        without asking the host anything, so that a CUDA graph can replay them. Softmax attention's cache grows
        within its room. All other calls return a new state as ever. What the other methods make of such a state
        may be overwritten too, and has memory of its own. A kind of state that is never overwritten is returned
        as it is.
        """
        return self

    def _rows(self, rows: Tensor | list[int] | slice) -> Tensor:
        """Row numbers from what indexes a list: numbers, a mask or a slice, on any device."""
        device = self.positions.device
        if not isinstance(rows, slice):
            rows = torch.as_tensor(rows, device=device)
        return torch.arange(len(self.positions), device=device)[rows].reshape(-1)

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> Self:
        """A copy with ``change(field name, tensor)`` in place of each tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return type(self)(**{name: change(name, x) if isinstance(x, Tensor) else x for name, x in values.items()})


@dataclass
class LinearState(State):
    """Of the linear operators: one matrix a head, ``memory [N, H, K, V]`` in fp32 (fp64 for fp64 inputs)."""

    positions: Tensor
    memory: Tensor
    in_place: bool = False

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def for_decoding(self, tokens: int) -> LinearState:
        return replace(self._map(lambda name, x: _copy(x)), in_place=True)


@dataclass
class LogLinearState(State):
    """Of the log-linear operators: O(log T) matrices and the raw tokens of the unfinished chunk.

    ``levels [J, N, H, K, V]``: entry ``j`` is the aligned group of ``2**j`` chunks that bit ``j`` of the chunk
    index announces, as of the last chunk boundary; zero where the bit is not set. ``k [N, 63, G, K]``,
    ``v [N, 63, H, V]``, ``g [N, 63, H]``, ``beta [N, 63, H]`` (delta rule only): the tokens since that boundary,
    in their own dtype, log decays not summed. ``max_position`` bounds the positions from above on the host,
    so that ``J`` can grow without a synchronisation; on the CPU it is their maximum. Of a state for decoding it
    is the position up to which there is room, so that nothing on the host changes from token to token.

    Where ``in_place``, ``clocks [N, H, V/16]`` (int64) has a copy of its row's position for every 16 columns of
    a head: the programs of a kernel cannot wait for each other, so each reads and advances a clock of its own.
    """

    positions: Tensor
    levels: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None
    max_position: int
    in_place: bool = False
    clocks: Tensor | None = None

    row_axis: ClassVar[dict[str, int]] = {"levels": 1}

    @property
    def num_bytes(self) -> int:
        tokens = int((self.positions % CHUNK_SIZE).sum())
        chunks = self.positions // CHUNK_SIZE
        matrices = sum(int((chunks >> j & 1).sum()) for j in range(len(self.levels)))
        per_token = sum(x[0, 0].nbytes for x in (self.k, self.v, self.g, self.beta) if x is not None)
        return tokens * per_token + matrices * (self.levels[0, 0].nbytes if len(self.levels) else 0)

    def for_decoding(self, tokens: int) -> LogLinearState:
        end = self.max_position + tokens
        missing = max(0, (end // CHUNK_SIZE).bit_length() - len(self.levels))
        spare = self.levels.new_zeros(missing, *self.levels.shape[1:])
        copy = self._map(lambda name, x: torch.cat([x.detach(), spare]) if name == "levels" else _copy(x))
        clocks = self.positions[:, None, None].repeat(1, self.v.shape[2], self.v.shape[3] // 16)
        return replace(copy, max_position=end, in_place=True, clocks=clocks)


@dataclass
class ConvolutionState(State):
    """Of the short convolution: the last ``W - 1`` inputs, ``inputs [N, W-1, D]``, zeros before the start."""

    positions: Tensor
    inputs: Tensor

    @property
    def num_bytes(self) -> int:
        return self.inputs.nbytes


@dataclass
class AttentionState(State):
    """Of softmax attention: the key-value cache, ``k [N, S, H_kv, K]`` and ``v [N, S, H_kv, V]``.

    Rows are aligned at the right: row ``n`` holds its tokens in the last ``positions[n]`` places, so that new
    ones are appended to all rows alike. ``ragged`` tells, on the host, that some row has fewer than ``S``.

    Where ``in_place``, :meth:`for_decoding` has left room behind each row's ``S`` places, which later calls write
    into: a token then costs no copy of the cache. What ``k`` and ``v`` show of this state stays as it is, but it
    can be continued once only.
    """

    positions: Tensor
    k: Tensor
    v: Tensor
    ragged: bool
    in_place: bool = False

    @property
    def num_bytes(self) -> int:
        return int(self.positions.sum()) * (self.k[0, :1].nbytes + self.v[0, :1].nbytes) if self.k.numel() else 0

    @property
    def capacity_bytes(self) -> int:
        return sum(max(x.nbytes, x.stride(0) * len(x) * x.itemsize) for x in (self.k, self.v))

    def for_decoding(self, tokens: int) -> AttentionState:
        def with_room(name: str, x: Tensor) -> Tensor:
            if name == "positions":
                return _copy(x)
            room = x.new_empty(len(x), x.shape[1] + tokens, *x.shape[2:])
            return room[:, : x.shape[1]].copy_(x.detach())

        return replace(self._map(with_room), in_place=True)

    def append(self, k: Tensor, v: Tensor) -> AttentionState:
        """The state after more tokens in every row, ``k [N, T, H_kv, K]`` and ``v [N, T, H_kv, V]``."""
        k, v = (_append(old, new, self.in_place) for old, new in ((self.k, k), (self.v, v)))
        return replace(self, positions=self.positions + k.shape[1] - self.k.shape[1], k=k, v=v)

    def reset(self, rows: Tensor | list[int] | slice) -> AttentionState:
        state = super().reset(rows)
        state.ragged = True
        return state


def _append(old: Tensor, new: Tensor, in_place: bool) -> Tensor:
    """``[N, S + T, H, K]``, in the memory behind ``old`` where there is room in every row."""
    S, T = old.shape[1], new.shape[1]
    room = in_place and old.dtype == new.dtype and old.stride(0) >= (S + T) * old.stride(1)
    if not room or (torch.is_grad_enabled() and new.requires_grad):
        return torch.cat([old.to(new.dtype), new], 1)
    longer = old.as_strided((len(old), S + T, *old.shape[2:]), old.stride())
    longer[:, S:] = new
    return longer


@dataclass
class MixerState(State):
    """Several states of one mixer by name, such as ``{"conv": …, "memory": …}``, all at the same positions."""

    parts: dict[str, State]

    @property
    def positions(self) -> Tensor:  # type: ignore[override]
        return next(iter(self.parts.values())).positions

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def capacity_bytes(self) -> int:
        return sum(part.capacity_bytes for part in self.parts.values())

    def to(self, *args: Any, **kwargs: Any) -> MixerState:
        return self._each("to", *args, **kwargs)

    def detach(self) -> MixerState:
        return self._each("detach")

    def clone(self) -> MixerState:
        return self._each("clone")

    def select(self, rows: Tensor | list[int] | slice) -> MixerState:
        return self._each("select", rows)

    def reset(self, rows: Tensor | list[int] | slice) -> MixerState:
        return self._each("reset", rows)

    def for_decoding(self, tokens: int) -> MixerState:
        return self._each("for_decoding", tokens)

    def _each(self, method: str, *args: Any, **kwargs: Any) -> MixerState:
        return type(self)({name: getattr(part, method)(*args, **kwargs) for name, part in self.parts.items()})

    def __getitem__(self, name: str) -> State:
        return self.parts[name]


class ModelState(MixerState):
    """The states of a model's layers, first to last."""

    @classmethod
    def of_layers(cls, layers: list[State]) -> ModelState:
        return cls({str(i): layer for i, layer in enumerate(layers)})

    @property
    def layers(self) -> list[State]:
        return list(self.parts.values())


def _copy(x: Tensor) -> Tensor:
    """Memory of its own, dense, outside of the autograd graph."""
    return x.detach().clone(memory_format=torch.contiguous_format)


# torch.load reads plain tensors only unless told which classes are data.
torch.serialization.add_safe_globals(
    [LinearState, LogLinearState, ConvolutionState, AttentionState, MixerState, ModelState]
)
