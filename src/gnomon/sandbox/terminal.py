"""What a sandbox's output may do to the terminal that shows it: letters and colours, no more.

Escape sequences move the cursor over what was said before, rename windows, fill the clipboard, ask the terminal to type. On a terminal they
are shown as text, `^[`; into a pipe or a file every byte goes as it came.
"""

from __future__ import annotations

import codecs
import re

COLOUR = re.compile(r"\x1b\[[0-9;]{0,32}m")
OPEN = re.compile(r"\x1b(?:\[[0-9;]{0,32})?\Z")
HARMLESS = frozenset("\n\t\r")


class Shown:
    """One stream of output, piece by piece; a sequence may come in two pieces."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.rest = ""

    def of(self, data: bytes, final: bool = False) -> bytes:
        """What to show of the next piece; with `final` nothing is kept back."""
        text = self.rest + self.decoder.decode(data, final)
        unfinished = None if final else OPEN.search(text)
        self.rest = unfinished.group() if unfinished else ""
        text = text[: len(text) - len(self.rest)]
        parts: list[str] = []
        at = 0
        for colour in COLOUR.finditer(text):
            parts += [plain(text[at : colour.start()]), colour.group()]
            at = colour.end()
        return "".join([*parts, plain(text[at:])]).encode()


def plain(text: str) -> str:
    """Text whose control characters are written out: `^[` for escape, `\\x9b` for those of eight bits."""
    if text.isprintable():
        return text
    return "".join(map(_written, text))


def _written(character: str) -> str:
    code = ord(character)
    if character in HARMLESS or not (code < 32 or 127 <= code < 160 or code in (0x202A, 0x202B, 0x202D, 0x202E, 0x2066, 0x2067, 0x2068)):
        return character
    return f"^{chr(code ^ 64)}" if code < 128 else f"\\x{code:02x}"
