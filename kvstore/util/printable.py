"""Text for a terminal: foreign text (prompts, names, paths) cannot move the cursor or reverse lines."""

from __future__ import annotations

import json
import logging
import unicodedata
from typing import Any

# Control characters, format characters (bidirectional ones among them), surrogates, line and paragraph separators.
_UNSAFE = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def _is_safe(character: str) -> bool:
    return (character.isascii() and character.isprintable()) or unicodedata.category(character) not in _UNSAFE


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file's name that is not UTF-8
        number -= 0xDC00
    if character in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[character]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def printable(text: str, *, lines: bool = False) -> str:
    """The text with its unsafe characters escaped: \\x1b, \\u202e. `lines` keeps a newline before an indented line."""
    if text.isascii() and text.isprintable():
        return text
    kept = ["\n" if lines and c == "\n" and text[i + 1 : i + 3] == "  " else c if _is_safe(c) else _escape(c)
            for i, c in enumerate(text)]  # fmt: skip
    return "".join(kept)


def json_text(value: Any, indent: int | None = 2) -> str:
    """JSON that is readable as it is; only unsafe characters are escaped, as JSON escapes them."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c == "\n" or _is_safe(c) else json.dumps(c)[1:-1] if c != "\x7f" else "\\u007f" for c in text)


class Formatter(logging.Formatter):
    """Log lines for a terminal: a message is one line, whatever it contains; a traceback has its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(printable, super().formatException(ei).split("\n")))
