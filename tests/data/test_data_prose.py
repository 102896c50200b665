"""data=prose: what is taken out of a source, and the real thing once."""

import re

import pytest

from src.data.prose import Prose, prose
from src.data.pystdlib import PyStdlib

SOURCE = '''#!/usr/bin/env python
# Copyright (c) 1999 Somebody. All rights reserved, as they say.
r"""Count the sheep of a flock.

The flock may be large, and it
may be   asleep.

    >>> count(flock, of="sheep")
    this output is not English text
    42

Afterwards the text goes on here.
------------------------------------
- The first point of a list with
  a second line.
- The second point of this list.
"""

import sheep  # a comment after code is not taken

# ======================
# The comment of a rule goes
# over two lines here.
LIMIT = """This string is a value, and no docstring."""
# x = [y[0] for y in z if y != {}]
call(
    "this text is an argument of a call",
    # Inside brackets there is this comment.
)


def count(flock):
    """Count all of them.  Too few words"""
    # The flock may be large, and it may be asleep.
    if flock:
        # This comment is indented and stays alone.
        return f"""no docstring is in here"""
    b"""these bytes are no docstring either"""
'''


def test_docstrings_and_comments():
    assert prose(SOURCE).split("\n\n") == [
        "Count the sheep of a flock.",
        "The flock may be large, and it may be asleep.",
        "Afterwards the text goes on here.",
        "- The first point of a list with a second line.",
        "- The second point of this list.",
        "The comment of a rule goes over two lines here.",
        "Inside brackets there is this comment.",
        "Count all of them. Too few words",
        "This comment is indented and stays alone.\n",
    ]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("", ""),
        ("x = 1\n", ""),
        ("# One more comment without line end.", "One more comment without line end.\n"),
        ('"""Not closed, so not a string at all\n', ""),
        ("# This comes before the mistake.\nif (:\n  '", "This comes before the mistake.\n"),
        (
            "# One comment stands here alone\n\n# and another one after it.\n",
            "One comment stands here alone\n\nand another one after it.\n",
        ),
        ("# A form feed\f and a tab\there do not matter.\n", "A form feed and a tab here do not matter.\n"),
        ("def f():\n    # An odd indent comes next.\n        x\n   y\n", "An odd indent comes next.\n"),
    ],
)
def test_sources_without_prose_or_with_mistakes(source, text):
    assert prose(source) == text


@pytest.fixture
def library(tmp_path):
    root = tmp_path / "python3"
    root.mkdir()
    for i in range(100):
        (root / f"m{i}.py").write_text(f'"""The module of number {i} counts some sheep."""\nx = {i}\n')
    return root


def _module(root, **options) -> Prose:
    module = Prose(Prose.Config(**({"name": "prose", "tokenizer": "bytes"} | options)))
    module.root = root
    return module


def test_splits_are_those_of_the_sources(library, tmp_path):
    module = _module(library, cache_dir=str(tmp_path / "cache"))
    module.setup("fit")
    for split in ("train", "val", "test"):
        numbers = [int(re.search(r"number (\d+)", text)[1]) for text in module.documents(split)]
        assert numbers
        assert all(PyStdlib.split_of(f"m{i}.py") == split for i in numbers)
        text = module.tokenizer.decode(module.stream(split).tokens)
        assert re.findall(r"number (\d+)", text) == [str(i) for i in numbers]
        assert "x =" not in text


def test_the_content_is_not_that_of_the_sources(library):
    sources = PyStdlib(PyStdlib.Config(name="pystdlib"))
    sources.root = library
    before = _module(library).fingerprint
    assert before != sources.fingerprint
    (library / "m1.py").write_text('"""Another text stands here now."""\n')
    assert _module(library).fingerprint != before


@pytest.mark.slow
def test_the_real_library(tmp_path):
    module = Prose(Prose.Config(name="prose", tokenizer="bytes", cache_dir=str(tmp_path)))
    module.setup("fit")
    facts = module.describe()
    print(facts)
    total = sum(facts[f"{split}.bytes"] for split in ("train", "val", "test"))
    assert 1e6 < total < 5e6
    assert min(facts["val.bytes"], facts["test.bytes"]) > 0.02 * total
    text = module.tokenizer.decode(module.stream("train").tokens)
    assert "\n>>>" not in text
    assert sum(c.isalpha() or c.isspace() for c in text) > 0.9 * len(text)
    assert text.count("self.") < len(text) / 5000
