"""Which bytes a step sees: a pure function of the seed and the step, the same after a resume."""

import random

import torch
from torch import Tensor

VALIDATION_BYTES = 32 * 1024
"""Enough for two decimals in bits per byte, and a second or so of one laptop core."""


def windows_at(text: Tensor, starts: list[int], length: int) -> Tensor:
    """`[len(starts), length]` int64: the bytes of `text` from each start."""
    offsets = torch.tensor(starts)[:, None] + torch.arange(length)
    return text[offsets.to(text.device)].long()


def training_batch(
    text: Tensor, *, seed: int, step: int, batch_size: int, sequence_length: int
) -> Tensor:
    """`[batch_size, sequence_length + 1]`: windows drawn at random for this seed and step."""
    generator = random.Random(f"{seed}/{step}")
    length = sequence_length + 1
    starts = [generator.randrange(len(text) - length + 1) for _ in range(batch_size)]
    return windows_at(text, starts, length)


def validation_windows(text: Tensor, sequence_length: int) -> Tensor:
    """`[N, S+1]`: windows spread evenly over `text`, S shortened where the text is shorter."""
    length = min(sequence_length + 1, len(text))
    count = max(1, min(VALIDATION_BYTES, len(text)) // length)
    last = len(text) - length
    starts = [last * index // max(1, count - 1) for index in range(count)]
    return windows_at(text, starts, length)
