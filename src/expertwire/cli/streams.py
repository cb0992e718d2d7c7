"""stdout and stderr as the commands need them: no character that stops the output, and no traceback where nobody takes it."""

from __future__ import annotations

import codecs
import io
import os
import sys

# How the characters that we print are spelt where the terminal's encoding lacks them.
_SPELLINGS = {
    "×": "x", "µ": "u", "−": "-", "–": "-", "…": "...", "→": "->", "≤": "<=", "≥": ">=", "±": "+-", "·": ".", "━": "-", "╸": "-", "╺": "-",
}  # fmt: skip
_HANDLER = "expertwire.spell"


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELLINGS.get(character, "?") for character in error.object[error.start : error.end]), error.end


def prepare() -> None:
    """Let stdout and stderr spell what their encoding cannot, in place of an exception after the whole measurement."""
    codecs.register_error(_HANDLER, _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def flush() -> OSError | None:
    """Write out what is buffered. The first error, after which that stream leads nowhere: the interpreter flushes it once more."""
    first = None
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError as error:
            first = first or error
            _silence(stream)
    return first


def _silence(stream: object) -> None:
    descriptor = getattr(stream, "fileno", lambda: -1)()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
