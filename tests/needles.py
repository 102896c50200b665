"""Texts for the tests of needles."""

import random
import re

from src.data.common import needles
from src.data.common.needles import TASKS
from src.data.niah import Niah


def sentences(rng: random.Random, n: int, words: str) -> str:
    """About n characters of sentences of these words, several to a line, with letters of several bytes."""
    parts, size = [], 0
    while size < n:
        sentence = " ".join(rng.choices([*words.split(), "naïve", "漢字", "3.14"], k=rng.randint(3, 12)))
        parts.append(sentence.capitalize() + rng.choice([". ", ". ", "! ", ".\n", ".\n\n"]))
        size += len(parts[-1])
    return "".join(parts)


def parts(module: Niah, example) -> tuple[str, str, str]:
    """Haystack with needles, question and answer as text, with what holds for every example checked."""
    eot = module.tokenizer.eot
    assert example.prompt_ids[0] == eot
    assert eot not in example.prompt_ids[1:] + example.answer_ids
    text = module.tokenizer.decode(example.prompt_ids[1:])
    hay, what, begun = text.rsplit("\n", 2)
    head = needles.instruction(TASKS[example.task])
    assert hay.startswith(head)
    assert re.fullmatch(r"What (is|are) the codes? of .*\?", what)
    assert begun.endswith((" is", " are"))
    return hay[len(head) :], what, module.tokenizer.decode(example.answer_ids)


def asked_keys(what: str) -> list[str]:
    return re.split(", | and ", re.fullmatch(r"What \w+ the codes? of (.*)\?", what)[1])
