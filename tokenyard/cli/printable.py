"""Bytes as characters that no terminal or picture trips over."""

import unicodedata

NEWLINE_SIGN = "↵"
TAB_SIGN = "→"
OTHER_SIGN = "·"


def one_character(value: int) -> str:
    """A single visible character for a byte: itself if printable ASCII, else a sign."""
    if value == ord("\n"):
        return NEWLINE_SIGN
    if value == ord("\t"):
        return TAB_SIGN
    return chr(value) if 32 <= value < 127 else OTHER_SIGN


def as_text(data: bytes) -> str:
    """UTF-8 text with its line breaks; what is invalid or not printable appears as an escape."""
    text = data.decode("utf-8", errors="backslashreplace").expandtabs(4)
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n" or unicodedata.category(character)[0] not in "CZ" or character == " ":
        return character
    return character.encode("unicode_escape").decode("ascii")
