"""Batches depend on seed and step alone; validation covers the text."""

import torch

from tokenyard.cli.batches import training_batch, validation_windows

TEXT = torch.arange(200, dtype=torch.uint8)


def batch(seed: int, step: int) -> torch.Tensor:
    return training_batch(TEXT, seed=seed, step=step, batch_size=4, sequence_length=8)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    assert torch.equal(batch(3, 7), batch(3, 7))
    assert not torch.equal(batch(3, 7), batch(3, 8))
    assert not torch.equal(batch(3, 7), batch(4, 7))
    assert not torch.equal(batch(1, 11), batch(11, 1))


def test_a_batch_does_not_touch_the_random_state() -> None:
    before = torch.get_rng_state()
    batch(0, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_are_consecutive_bytes_from_anywhere_in_the_text() -> None:
    rows = torch.cat([batch(0, step) for step in range(1, 400)])
    assert rows.shape[1] == 9
    assert (rows.diff(dim=1) == 1).all()
    assert rows.min() == 0
    assert rows.max() == 199


def test_a_text_of_one_sequence_has_one_window() -> None:
    rows = training_batch(TEXT[:9], seed=0, step=1, batch_size=3, sequence_length=8)
    assert torch.equal(rows, torch.arange(9).expand(3, 9))


def test_validation_windows_reach_from_the_first_byte_to_the_last() -> None:
    windows = validation_windows(TEXT, 15)
    assert windows.shape == (12, 16)
    assert windows[0, 0] == 0
    assert windows[-1, -1] == 199


def test_a_short_validation_text_is_one_short_window() -> None:
    assert torch.equal(validation_windows(TEXT[:5], 15), torch.arange(5)[None])
