"""Standard output that cannot be written: its reader has gone (`| head`), or a disk is full."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class OutputError(OSError):
    """Standard output, and nothing else, cannot be written."""


class _Output:
    """A text stream whose errors are OutputErrors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told_apart():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told_apart():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(*error.args) from error


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Inside, and at its end, output that cannot be written ends the process: with status 141 and without a word where
    its reader has gone, as SIGPIPE ends others, else with one line and status 1."""
    stream = sys.stdout
    sys.stdout = _Output(stream)
    try:
        yield
        sys.stdout.flush()
    except OutputError as error:
        discard(stream)
        if isinstance(error.__cause__, BrokenPipeError):
            raise SystemExit(141) from None
        sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
        raise SystemExit(1) from None
    finally:
        sys.stdout = stream


def discard(stream: TextIO) -> None:
    """From here on, what is written to a stream that cannot be written goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
