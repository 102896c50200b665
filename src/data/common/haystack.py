"""Long stretches of a corpus in token space, and the places between their tokens where a sentence may stand."""

import numpy as np

from src.data.common.packing import Stream
from src.data.common.tokenizer import Tokenizer

SEARCH = 1 << 10  # tokens looked through for a sentence's beginning
NEAR = 64  # a sentence end counts as near within so many tokens, or within
NEAR_SHARE = 1 / 20  # this share of the stretch
_CLOSING = "\"')]}»”’"


class Haystack:
    """Cuts stretches out of token streams of one tokenizer, and finds places in them.

    A place p lies before token p. It is a border where a sentence (. ! ?) or a line ends before it and token p begins
    with white space: there a text that begins with a space goes in smoothly.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eot = tokenizer.eot
        self.line_end = tokenizer.encode("\n")[-1]
        size = tokenizer.vocab_size
        self.ends, self.spaced, self.opens, self.breaks = (np.zeros(size, dtype=bool) for _ in range(4))
        context = tokenizer.encode("a")[-1:]  # some decoders drop the space that a text begins with
        skipped = len(tokenizer.decode(context))
        for i in range(size):
            text = tokenizer.decode([*context, i])[skipped:]
            self.ends[i] = text.rstrip(_CLOSING).endswith((".", "!", "?"))
            self.spaced[i] = text[-1:].isspace()
            self.opens[i] = text[:1].isspace()
            self.breaks[i] = text.startswith("\n")

    def borders(self, tokens: np.ndarray) -> np.ndarray:
        """bool [n + 1]: the borders of n tokens; both ends are always among them."""
        found = np.ones(len(tokens) + 1, dtype=bool)
        before, after = tokens[:-1], tokens[1:]
        found[1:-1] = (self.ends[before] & self.opens[after]) | (~self.spaced[before] & self.breaks[after])
        return found

    def cut(self, stream: Stream, n: int, where: float) -> np.ndarray:
        """int64 [n]: the tokens from the first border after `where` (in [0, 1), of the stream) on.

        The stream is a ring: after its last document comes the first. End-of-text becomes a line end.
        """
        size = len(stream)
        start = int(where * size)
        around = self._read(stream, start, min(SEARCH, size) + 1)
        ahead = np.flatnonzero(self.borders(around)[1:-1])
        return self._read(stream, start + 1 + int(ahead[0]) if len(ahead) else start, n)

    def _read(self, stream: Stream, start: int, n: int) -> np.ndarray:
        size = len(stream)
        start %= size
        parts = [stream.tokens[start : min(size, start + n)]]
        left = n - len(parts[0])
        parts += [stream.tokens[:size]] * (left // size) + [stream.tokens[: left % size]]
        tokens = np.concatenate(parts).astype(np.int64)
        tokens[tokens == self.eot] = self.line_end
        return tokens

    def places(self, tokens: np.ndarray, depths: list[float]) -> list[int]:
        """For each depth in [0, 1] the border nearest to it; where none is near, the nearest place before a word;
        where none of these either, the place itself."""
        n = len(tokens)
        near = max(NEAR, NEAR_SHARE * n)
        borders = np.flatnonzero(self.borders(tokens))
        found = []
        for depth in depths:
            wanted = place = round(depth * n)
            for candidates in (borders, None):
                if candidates is None:
                    candidates = np.flatnonzero(self.opens[tokens])
                nearest = nearest_of(candidates, wanted)
                if nearest is not None and abs(nearest - wanted) <= near:
                    place = nearest
                    break
            found.append(place)
        return found


def nearest_of(places: np.ndarray, wanted: float) -> int | None:
    """The one of the ascending places that is nearest; None of none."""
    if not len(places):
        return None
    i = int(np.searchsorted(places, wanted))
    return int(min(places[max(0, i - 1) : i + 1], key=lambda place: abs(place - wanted)))


def insert(tokens: np.ndarray, places: list[int], pieces: list[np.ndarray]) -> tuple[np.ndarray, list[int]]:
    """The tokens with each piece at its place, and the pieces' numbers in the order in which they appear."""
    order = sorted(range(len(pieces)), key=lambda i: places[i])
    parts, begin = [], 0
    for i in order:
        parts += [tokens[begin : places[i]], pieces[i]]
        begin = places[i]
    return np.concatenate([*parts, tokens[begin:]]), order
