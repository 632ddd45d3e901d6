"""The pictures are drawn for every shape of run, and show what they claim."""

import io

import pytest
import torch
from matplotlib.image import imread

from tokenyard.cli import pictures
from tokenyard.cli.metrics import StepMetrics

pytestmark = pytest.mark.filterwarnings("error::UserWarning")


def records(steps: int, layers: int, experts: int) -> list[StepMetrics]:
    return [
        StepMetrics(
            step=step,
            bits_per_byte=8 / step,
            balance_loss=1.0,
            z_loss=0.0,
            gradient_norm=1.0,
            learning_rate=1e-3,
            tokens_per_second=1.0,
            tokens_per_expert=[[step] * experts] * layers,
            validation_bits_per_byte=8 / step if step % 3 == 0 else None,
        )
        for step in range(1, steps + 1)
    ]


@pytest.mark.parametrize(("steps", "layers", "experts"), [(1, 1, 1), (7, 3, 8), (300, 9, 40)])
def test_loss_and_load_are_drawn_for_every_size(steps: int, layers: int, experts: int) -> None:
    made = records(steps, layers, experts)
    for png in (pictures.loss_picture(made, 3.5), pictures.load_picture(made)):
        height, width, _ = imread(io.BytesIO(png)).shape
        assert width > 1000
        assert height > 300


@pytest.mark.parametrize("experts", [1, 8, 64])
def test_the_routing_picture_has_the_colours_of_the_experts_chosen(experts: int) -> None:
    passage = b"$x_1$ {\\alpha}\t\x00\xff\nsecond line"
    chosen = [[position % experts for position in range(len(passage))]] * 2
    png = pictures.routing_picture(passage, chosen, experts)
    image = imread(io.BytesIO(png))
    pixels = {tuple(pixel) for pixel in (image[..., :3] * 255).round().astype(int).reshape(-1, 3)}
    for colour in pictures.EXPERT_COLOURS[:experts]:
        assert tuple(bytes.fromhex(colour[1:])) in pixels


def test_lines_break_where_the_text_does_and_where_they_are_full() -> None:
    full = b"x" * pictures.LONGEST_LINE
    lines = pictures._lines(b"ab\n\n" + full + b"yz")
    assert [len(line) for line in lines] == [3, 1, pictures.LONGEST_LINE, 2]
    assert [position for line in lines for position in line] == list(range(len(full) + 6))


def test_with_more_experts_than_colours_the_frequent_ones_have_one() -> None:
    chosen = [expert for expert in range(20) for _ in range(expert)]
    colours = pictures._colours(chosen, 20)
    assert sorted(colours) == list(range(12, 20))
    assert len(set(colours.values())) == len(pictures.EXPERT_COLOURS)


def test_smoothing_averages_the_steps_around() -> None:
    values = torch.arange(80, dtype=torch.float64) ** 2
    smooth = pictures._smooth(values)
    # (i-2)^2 + ... + (i+2)^2 is 5 i^2 + 10
    torch.testing.assert_close(smooth[2:-2], values[2:-2] + 2)
    assert smooth[0] == values[:3].mean()
    assert smooth[-1] == values[-3:].mean()


def test_binning_keeps_the_mean_of_every_expert() -> None:
    loads = torch.rand(960, 3, dtype=torch.float64)
    binned = pictures._binned(loads)
    assert binned.shape == (pictures.MOST_COLUMNS, 3)
    torch.testing.assert_close(binned.mean(0), loads.mean(0))
    assert torch.equal(pictures._binned(loads[:5]), loads[:5])
