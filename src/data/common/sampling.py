"""Which samples a rank sees at a step, and random numbers that depend on nothing but their address.

Both are pure functions of a few integers. So a resumed run needs no loader state: the optimizer step says
where it was, and any row of any epoch can be drawn without drawing those before it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

from src.errors import UserError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): a bijection that scatters neighbours."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def hash_bits(*address: int | np.ndarray) -> np.ndarray:
    """64 random bits for each address (integers ≥ 0; arrays broadcast), equal on every machine.

    A counter-based generator (Salmon et al. 2011): h ← mix((h + 1) · golden + part) over the parts.
    """
    h = np.zeros((), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in address:
            h = _mix((h + np.uint64(1)) * _GOLDEN + np.asarray(part).astype(np.uint64))
    return h


def hash_uniform(*address: int | np.ndarray) -> np.ndarray:
    """Floats in (0, 1), 53 bits, one for each address; see `hash_bits`."""
    return ((hash_bits(*address) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


@lru_cache(maxsize=4)  # consecutive batches ask for the same epoch, one at its border for two
def permutation(n: int, *address: int) -> np.ndarray:
    """A random order of range(n), a pure function of the address (for example: seed, epoch). Read-only."""
    order = np.argsort(hash_bits(*address, np.arange(n)), kind="stable")
    order.setflags(write=False)
    return order


def accumulation(batch_size: int, micro_batch_size: int | None, world_size: int) -> int:
    """Micro-batches per optimizer step: batch_size / (micro_batch_size · world_size), which must be whole.

    micro_batch_size None means batch_size / world_size (no accumulation). Raises UserError with the nearest
    batch size that works.
    """
    if micro_batch_size is not None and micro_batch_size < 1:
        raise UserError(f"trainer.micro_batch_size={micro_batch_size}: must be at least 1")
    per_pass = (micro_batch_size or 1) * world_size
    if batch_size % per_pass:
        nearest = max(1, round(batch_size / per_pass)) * per_pass
        micro = f"trainer.micro_batch_size={micro_batch_size} times " if micro_batch_size else ""
        raise UserError(
            f"data.batch_size={batch_size} must be a multiple of {micro}the number of ranks ({world_size}): "
            f"the nearest is data.batch_size={nearest}"
        )
    return batch_size // per_pass if micro_batch_size else 1


@dataclass(frozen=True)
class Draw:
    """One micro-batch of one rank: its samples, and whether they count (False: a filler, all labels -100)."""

    samples: Sequence[int]
    counts: bool = True


class StepSampler(Sampler[Draw]):
    """The micro-batches of one rank from optimizer step `start()` on, for ever.

    Step s uses the samples [s·B, (s+1)·B); micro-batch m of rank r takes (m·world + r)·micro + k of them,
    k = 0…micro-1. `start` is asked at each iteration, so an iterator that Lightning makes anew goes on.
    """

    def __init__(
        self,
        batch_size: int,
        micro_batch_size: int | None,
        rank: int = 0,
        world_size: int = 1,
        start: Callable[[], int] = lambda: 0,
    ) -> None:
        self.batch_size = batch_size
        self.accumulation = accumulation(batch_size, micro_batch_size, world_size)
        self.micro_batch_size = batch_size // (self.accumulation * world_size)
        self.rank, self.world_size, self.start = rank, world_size, start

    def __iter__(self) -> Iterator[Draw]:
        step = self.start()
        while True:
            for m in range(self.accumulation):
                first = step * self.batch_size + (m * self.world_size + self.rank) * self.micro_batch_size
                yield Draw(range(first, first + self.micro_batch_size))
            step += 1


class EvalSampler(Sampler[Draw]):
    """Every batch once over all ranks: batch i goes to rank i mod world.

    All ranks get equally many (collectives inside a sharded model need that); where the batches do not
    divide, the last ones of some ranks are fillers: copies of the first batch that count nothing.
    """

    def __init__(self, batches: Sequence[Sequence[int]], rank: int, world_size: int) -> None:
        own = [Draw(samples) for samples in batches[rank::world_size]]
        length = -(-len(batches) // world_size)
        self.draws = own + [Draw(batches[0], counts=False)] * (length - len(own))

    def __iter__(self) -> Iterator[Draw]:
        return iter(self.draws)

    def __len__(self) -> int:
        return len(self.draws)
