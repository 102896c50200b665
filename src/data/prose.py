"""data=prose: the English of the standard library, the docstrings and comments of the sources of data=pystdlib.

About 2.2 MB (Python 3.11). A document is a file's docstrings and own-line comments in their order, one paragraph a
line with a blank line between; without interactive sessions, rules, tables and what looks like code. Splits are those
of data=pystdlib.
"""

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterator

from src.data import Split
from src.data.pystdlib import PyStdlib, decode

VERSION = 1  # of the cleaning: part of the content's hash
LEAST_WORDS = 4  # of a paragraph
MOST_SYMBOLS = 0.03  # of a paragraph's characters
_BULLET = re.compile(r"([-*+•]|\d+[.)])\s")
_SYMBOLS = re.compile(r"[][{}<>=_\\|@$%^&*+/~`#]")
_BETWEEN = {tokenize.NL, tokenize.COMMENT}  # tokens inside and between statements alike
_BORDERS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Prose(PyStdlib):
    """English text out of Python sources; see the module."""

    def documents(self, split: Split) -> Iterator[str]:
        for path in self._files:
            if self.split_of(path) == split:
                yield prose(decode(self._source(path)))

    def size(self) -> None:
        return None  # known only after reading

    def content_hash(self) -> str:
        return hashlib.sha256(f"prose {VERSION} {super().content_hash()}".encode()).hexdigest()


def prose(source: str) -> str:
    """The sentences of a Python source; empty where there are none. A source that does not parse is read as far as
    it does."""
    paragraphs = [p for block in _blocks(source) for p in _paragraphs(block)]
    return "\n\n".join(dict.fromkeys(paragraphs)) + "\n" if paragraphs else ""  # each once a document


def _blocks(source: str) -> Iterator[str]:
    """The docstrings (strings that begin a statement), and runs of comments on lines of their own."""
    comments: list[str] = []
    row, before = 0, tokenize.NEWLINE
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            own_line = not token.line[: token.start[1]].strip()
            if token.type == tokenize.COMMENT and own_line:
                if comments and token.start[0] != row + 1:
                    yield "\n".join(comments)
                    comments = []
                comments.append(token.string.lstrip("#"))
                row = token.start[0]
            if token.type in _BETWEEN:
                continue
            if comments and token.type not in _BORDERS:
                yield "\n".join(comments)
                comments = []
            if token.type == tokenize.STRING and before in _BORDERS:
                yield _string(token.string)
            before = token.type
    except (tokenize.TokenError, SyntaxError):
        pass
    if comments:
        yield "\n".join(comments)


def _string(literal: str) -> str:
    try:
        value = ast.literal_eval(literal)
    except (ValueError, SyntaxError):
        return ""
    return value if isinstance(value, str) else ""


def _paragraphs(block: str) -> Iterator[str]:
    """What reads as English: lines joined to paragraphs, a new one at a blank line and at a bullet."""
    lines: list[str] = []
    session = False
    for line in [*block.expandtabs().splitlines(), ""]:
        text = line.strip()
        session = bool(text) and (session or text.startswith((">>>", "$ ")))
        no_text = session or not any(c.isalpha() for c in text)
        if no_text or _BULLET.match(text):
            if _english(paragraph := " ".join(" ".join(lines).split())):
                yield paragraph
            lines = []
        if not no_text:
            lines.append(text)


def _english(paragraph: str) -> bool:
    """Enough words that end somewhere, few symbols, and no licence, which many files repeat."""
    words = paragraph.split()
    symbols = len(_SYMBOLS.findall(paragraph))
    spelled = sum(word.strip("\"'(),.;:!?").replace("-", "").isalpha() for word in words)
    return (
        len(words) >= LEAST_WORDS
        and symbols <= MOST_SYMBOLS * len(paragraph)
        and spelled >= 0.75 * len(words)
        and not re.search(r"copyright|licen[sc]e|all rights reserved|warrant", paragraph, re.IGNORECASE)
    )
