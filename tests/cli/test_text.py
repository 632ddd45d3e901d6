"""Reading text, holding a part of it out, and the bigram baseline."""

import math
from pathlib import Path

import pytest
import torch

from tokenyard.cli.batches import validation_windows
from tokenyard.cli.errors import CommandError
from tokenyard.cli.text import (
    BLOCK,
    bigram_bits_per_byte,
    bigram_log2_probabilities,
    load_corpus,
    standard_library,
)

LIMIT = 10**7


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_the_standard_library_is_read_in_a_fixed_order_without_tests() -> None:
    files = standard_library()
    names = [path.name for path in files]
    assert files == standard_library()
    assert {"abc.py", "argparse.py", "typing.py"} <= set(names)
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)


def test_folders_are_read_sorted_and_hidden_files_skipped(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "c.txt").write_bytes(b"c" * 100)
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    (tmp_path / ".hidden").write_bytes(b"h" * 100)
    (tmp_path / ".git" / "d.txt").write_bytes(b"d" * 100)
    corpus = load_corpus([str(tmp_path)], LIMIT, 16)
    both = bytes(corpus.training.tolist()) + bytes(corpus.validation.tolist())
    assert sorted(both) == sorted(b"a" * 100 + b"c" * 100)
    assert both.startswith(b"a" * 100)
    assert "2 files" in corpus.description


def test_training_and_validation_share_no_byte_position(tmp_path: Path) -> None:
    data = b"".join(number.to_bytes(4, "big") for number in range(BLOCK // 2))
    (tmp_path / "text").write_bytes(data)
    corpus = load_corpus([str(tmp_path / "text")], LIMIT, 16)
    held_out = BLOCK // 16
    assert len(corpus.training) == 2 * (BLOCK - held_out)
    assert bytes(corpus.validation.tolist()) == (
        data[BLOCK - held_out : BLOCK] + data[2 * BLOCK - held_out :]
    )


def test_the_text_limit_cuts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 500)
    (tmp_path / "b").write_bytes(b"b" * 500)
    names = [str(tmp_path / "a"), str(tmp_path / "b")]
    cut = load_corpus(names, 600, 16)
    assert cut.cut_short
    assert len(cut.training) + len(cut.validation) == 600
    assert not load_corpus(names, 1000, 16).cut_short
    assert cut.sha256 != load_corpus(names, 1000, 16).sha256


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "no such file"), (b"", "is empty"), (b"x" * 17, "too short")]
)
def test_texts_that_cannot_be_trained_on(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError, match=reason):
        load_corpus([str(path)], LIMIT, 16)


def test_a_text_as_long_as_the_error_asks_for_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for sequence_length in (2, 16, 100, 256, 5000):
        path.write_bytes(b"x")
        with pytest.raises(CommandError, match="too short") as caught:
            load_corpus([str(path)], LIMIT, sequence_length)
        needed = int(str(caught.value).rsplit(" ", 1)[1])
        path.write_bytes(b"x" * needed)
        assert len(load_corpus([str(path)], LIMIT, sequence_length).training) > sequence_length
        path.write_bytes(b"x" * (needed * 9 // 10))
        with pytest.raises(CommandError, match="too short"):
            load_corpus([str(path)], LIMIT, sequence_length)


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 100)

    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(CommandError, match=r"cannot read .*secret: Permission denied"):
        load_corpus([str(path)], LIMIT, 16)


def test_bigram_probabilities_sum_to_one_and_none_is_zero() -> None:
    for data in (b"abracadabra" * 20, bytes(range(256)) * 3, b"aa"):
        table = bigram_log2_probabilities(as_tensor(data))
        assert table.isfinite().all()
        torch.testing.assert_close(
            table.exp2().sum(1), torch.ones(256, dtype=torch.float64), rtol=0, atol=1e-12
        )


def test_bigram_bits_by_hand() -> None:
    # "abab": a is followed by b twice (1 successor), so P(b|a) = (2 + 1 * P(b)) / (2 + 1),
    # and P(b) = (2 + 1) / (4 + 256).
    expected = -math.log2((2 + 3 / 260) / 3)
    bits = bigram_bits_per_byte(as_tensor(b"abab"), as_tensor(b"ab")[None])
    assert bits == pytest.approx(expected, abs=1e-12)


def test_bigram_bits_of_a_periodic_text_vanish_and_of_noise_do_not() -> None:
    text = as_tensor(b"abcd" * 1000)
    assert bigram_bits_per_byte(text, validation_windows(text, 16)) < 0.02
    noise = torch.randint(256, (200_000,), dtype=torch.uint8)
    assert 7.9 < bigram_bits_per_byte(noise[:-5000], noise[None, -5000:]) < 8.5
