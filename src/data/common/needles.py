"""The wording of data=niah: sentences, words and values, and how an answer is scored.

The eight needle tasks are those of RULER (Hsieh et al. 2024, arXiv:2404.06654); sentences and words are this
repository's own, so scores compare with each other and not with published ones.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from src.data.common.sampling import hash_bits, hash_uniform


class Task(NamedTuple):
    """One of the eight tasks: `n_keys` keys with `n_values` values each, of which `n_queries` are asked."""

    haystack: Literal["noise", "text", "needles"]
    """One line repeated, a corpus, or lines that are needles with other keys (then n_keys counts none of these)."""
    key: Literal["word", "uuid"] = "word"
    value: Literal["number", "uuid"] = "number"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1

    @property
    def n_needles(self) -> int:
        return self.n_keys * self.n_values

    @property
    def n_answers(self) -> int:
        return self.n_queries * self.n_values


TASKS: dict[str, Task] = {
    "single_1": Task("noise"),
    "single_2": Task("text"),
    "single_3": Task("text", value="uuid"),
    "multikey_1": Task("text", n_keys=4),
    "multikey_2": Task("needles"),
    "multikey_3": Task("needles", key="uuid", value="uuid"),
    "multivalue": Task("text", n_values=4),
    "multiquery": Task("text", n_keys=4, n_queries=4),
}

VERSION = 2  # of wording and draws: part of the fingerprint
NOISE = "Rain falls on the roof. A clock ticks. The cat sleeps, and the day goes by."


def instruction(task: Task) -> str:
    """What stands before the haystack."""
    return (
        "Keep the codes in mind that this text gives." if task.n_answers > 1 else "A code in this text is asked below."
    )


def needle(key: str, value: str) -> str:
    return f"The code of {key} is {value}."


def question(keys: Sequence[str], n_values: int) -> tuple[str, str]:
    """The question after the haystack, and the beginning of its answer, which the values go on."""
    names = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
    one = len(keys) * n_values == 1
    noun, verb = ("code", "is") if one else ("codes", "are")
    return f"What {verb} the {noun} of {names}?", f"The {noun} of {names} {verb}"


def answer(values: Sequence[str]) -> str:
    return " " + ", ".join(values)


def contained(text: str, references: Sequence[str]) -> float:
    """The share of the references that occur in the text, whatever the case: a generated answer's score."""
    lowered = text.lower()
    return sum(reference.lower() in lowered for reference in references) / len(references)


# Draws: pure functions of an address


def distinct(n_choices: int, n: int, *address: int) -> list[int]:
    """n different numbers of range(n_choices), uniformly, the first k of them whatever n ≥ k is.

    Fisher–Yates on a deck of which only moved cards are written down.
    """
    if n > n_choices:
        raise ValueError(f"{n} different ones of {n_choices}")
    moved: dict[int, int] = {}
    drawn = []
    for i, u in enumerate(hash_uniform(*address, np.arange(n)).tolist()):
        j = i + int(u * (n_choices - i))
        drawn.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return drawn


def words(n: int, *address: int) -> list[str]:
    """n different keys of an adjective and a noun."""
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in distinct(N_WORD_KEYS, n, *address)]


def numbers(n: int, *address: int) -> list[str]:
    """n different numbers of seven digits."""
    return [str(1_000_000 + i) for i in distinct(9_000_000, n, *address)]


def uuids(n: int, *address: int) -> list[str]:
    """n random UUIDs (version 4)."""
    bits = hash_bits(*address, np.arange(n)[:, None], np.arange(2)[None])
    texts = []
    for high, low in bits.tolist():
        digits = f"{high:016x}{low:016x}"
        variant = "89ab"[low >> 62]
        texts.append(f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}")
    return texts


KINDS = {"word": words, "number": numbers, "uuid": uuids}

_ADJECTIVES = """
able amber ancient autumn bitter blue bold brave breezy brief bright broad bronze brown calm careful cheap cheerful
chilly clean clear clever cloudy coastal cold colorful common copper cosy crimson curious daily damp dark dear deep
distant dry dusty eager early eastern easy elder empty equal fair faithful famous fancy fast final fine firm flat
foggy fond foreign free fresh friendly frosty gentle giant glad golden good grand grateful gray great green handy
happy hard heavy hidden high hollow honest humble hungry idle inner jolly keen kind large late lazy light little
lively local lonely long loud lovely lucky major marble merry mild minor misty modern narrow native neat new noble
northern odd old open orange outer pale patient plain pleasant polite popular proud purple quick quiet rapid rare
ready red rich ripe robust rough round royal rustic salty secret sharp shiny short silent silver simple sleepy slow
small smart smooth snowy soft solid sour southern spare steady steep strong sunny sweet swift tall tender thick thin
tidy tiny tough upper useful vast violet warm western white whole wide wild windy winter wise wooden yellow young
"""
_NOUNS = """
actor anchor apple arrow autumn badge baker bakery barn basket beach bean bear bell bench berry bird blanket boat book
bottle branch bread brick bridge brother bucket butter button cabin cable camel camp candle canyon captain card carpet
castle cat cave chair cherry circle city cliff clock cloud coat coffee coin corner cottage cousin creek cup curtain
desert desk doctor door dream drum eagle engine farm farmer feather fence field finger fire fish flag flame flower
forest fork fountain fox friend garden gate glass glove goose grape guitar hammer harbor hat hill honey horse hotel
house island jacket kettle key kitchen kite ladder lake lamp lantern leaf lemon letter library lion market meadow
melon mill mirror moon morning mountain museum needle nest oak ocean office onion orchard owl painter palace paper
park path pearl pencil pepper piano picture pillow pilot planet plate pocket pond potato prince queen rabbit radio
rain river road robin roof room rope rose sail sailor school shadow ship shirt shoe shop singer sister sky snow sofa
soup spoon spring square stable stage star station stone storm street student summer table teacher temple tent theater
ticket tiger tower town train tree tunnel turtle uncle valley village violin wagon wall water whale wheel wind window
wolf wood
"""
ADJECTIVES, NOUNS = tuple(_ADJECTIVES.split()), tuple(_NOUNS.split())
N_WORD_KEYS = len(ADJECTIVES) * len(NOUNS)
