"""Standard output that cannot be written: its reader has gone (`| head`), or a disk is full."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from src.options import one_line


class OutputError(OSError):
    """Standard output, and nothing else, cannot be written."""


class _Checked:
    """A text stream whose errors are OutputErrors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputError(*error.args) from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(*error.args) from error

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._stream, name)


class _Forgiving(_Checked):
    """One whose first error is said on standard error, and ends what is written, but not the process."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OutputError as error:
            self._end(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OutputError as error:
            self._end(error)

    def _end(self, error: OutputError) -> None:
        discard(self._stream)
        sys.stderr.write(f"the output cannot be written ({error.strerror or one_line(error)}): going on without it\n")


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Inside, output that cannot be written ends the process: with status 141 and without a word where its reader has
    gone, as SIGPIPE ends others, else with one line and status 1. What ends it otherwise keeps its own status."""
    given = sys.stdout
    with contextlib.ExitStack() as opened:
        # None after `>&-`: nobody wants it.
        stream = opened.enter_context(open(os.devnull, "w")) if given is None else given
        sys.stdout = _Checked(stream)
        try:
            yield
            sys.stdout.flush()
        except OutputError as error:
            discard(stream)
            if isinstance(error.__cause__, BrokenPipeError):
                raise SystemExit(141) from None
            sys.stderr.write(f"error: the output cannot be written: {error.strerror or one_line(error)}\n")
            raise SystemExit(1) from None
        except BaseException:
            try:
                stream.flush()
            except OSError:
                discard(stream)  # or Python would, when it ends, say so with a status of its own
            raise
        finally:
            sys.stdout = given


@contextlib.contextmanager
def forgiving() -> Iterator[None]:
    """Inside, output that cannot be written is said once, and work goes on without: no reason to lose a training."""
    given = sys.stdout
    sys.stdout = _Forgiving(given)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = given


def discard(stream: TextIO) -> None:
    """From here on, what is written to a stream that cannot be written goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no file
        number = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
        finally:
            os.close(null)
