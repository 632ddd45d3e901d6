"""No byte reaches a terminal or a picture as a control character."""

import unicodedata

from tokenyard.cli.printable import as_text, one_character


def test_every_byte_has_one_visible_character() -> None:
    signs = [one_character(value) for value in range(256)]
    assert all(len(sign) == 1 for sign in signs)
    assert all(unicodedata.category(sign)[0] not in "C" for sign in signs)
    assert one_character(ord("a")) == "a"
    assert one_character(ord("\n")) != one_character(0)


def test_text_keeps_what_is_printable() -> None:
    assert as_text("naïve → 漢字\nnext".encode()) == "naïve → 漢字\nnext"
    assert as_text(b"a\tb") == "a   b"


def test_text_escapes_what_is_not() -> None:
    assert as_text(b"\x1b[2J") == "\\x1b[2J"
    assert as_text(b"\xff\x00") == "\\xff\\x00"
    assert as_text(b"a\r\n") == "a\\r\n"
    assert as_text("\u202e\u2028\x9b".encode()) == "\\u202e\\u2028\\x9b"
