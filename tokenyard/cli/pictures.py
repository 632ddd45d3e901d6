"""The pictures of a run, as PNG bytes. Drawn without pyplot, hence without global state."""

import io
import math
from collections import Counter
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from tokenyard.cli.metrics import StepMetrics
from tokenyard.cli.printable import one_character

EXPERT_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#333333",
)
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""

OTHER_COLOUR = "#C8C8C8"
INK, FAINT = "#222222", "#8A8A8A"
TITLE_SIZE, LABEL_SIZE, TICK_SIZE, CHARACTER_SIZE = 16, 13, 12, 12
DOTS_PER_INCH = 150
MOST_PANELS = 6
MOST_COLUMNS = 240
LONGEST_LINE, SHORTEST_LINE = 80, 40
MOST_LINES = 6
CELL_WIDTH, CELL_HEIGHT = 0.15, 0.29
"""Of one byte in the routing picture, in inches."""


def loss_picture(records: Sequence[StepMetrics], bigram_bits: float) -> bytes:
    """Training and validation bits per byte over the steps, with the bigram model's as a line."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.add_subplot()
    steps = [record.step for record in records]
    losses = torch.tensor([record.bits_per_byte for record in records], dtype=torch.float64)
    axes.plot(steps, losses.tolist(), color="#9CC3E0", linewidth=1, label="training, each step")
    axes.plot(
        steps, _smooth(losses).tolist(), color="#0072B2", linewidth=2.5, label="training, smoothed"
    )
    checked = [record for record in records if record.validation_bits_per_byte is not None]
    if checked:
        axes.plot(
            [record.step for record in checked],
            [record.validation_bits_per_byte or 0.0 for record in checked],
            "o",
            color="#D55E00",
            markersize=8,
            label=f"validation ({checked[-1].validation_bits_per_byte:.2f} at the end)",
        )
    axes.axhline(
        bigram_bits,
        color=INK,
        linestyle="--",
        linewidth=1.8,
        label=f"bigram model, validation ({bigram_bits:.2f})",
    )
    lowest = min(losses.min().item(), bigram_bits)
    highest = max(bigram_bits * 1.5, losses.median().item() * 1.1)
    axes.set_ylim(max(0.0, lowest - 0.3), highest)
    axes.set_xlim(0, max(steps) * 1.01 + 1)
    _title(axes, "Loss of the byte-level MoE language model")
    axes.set_xlabel("step", fontsize=LABEL_SIZE)
    axes.set_ylabel("bits per byte", fontsize=LABEL_SIZE)
    axes.grid(color="#E4E4E4")
    axes.legend(fontsize=TICK_SIZE, frameon=False, loc="upper right")
    return _png(figure)


def load_picture(records: Sequence[StepMetrics]) -> bytes:
    """Load of each expert over the steps, one panel per layer, as a multiple of the mean load."""
    loads = torch.tensor([record.tokens_per_expert for record in records]).double()
    loads /= loads.mean(dim=2, keepdim=True).clamp(min=1e-9)
    first, last = records[0].step, records[-1].step
    layers = _chosen_layers(loads.shape[1])
    height = 1.6 + len(layers) * min(3.2, max(1.7, 0.2 * loads.shape[2]))
    figure = Figure(figsize=(11, height), layout="constrained")
    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, layers, strict=True):
        image = axes.imshow(
            _binned(loads[:, layer]).T.numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="PuOr_r",
            vmin=0,
            vmax=2,
            extent=(first - 0.5, last + 0.5, loads.shape[2] - 0.5, -0.5),
        )
        axes.set_ylabel(f"layer {layer}\nexpert", fontsize=LABEL_SIZE)
        every = math.ceil(loads.shape[2] / 8)
        axes.set_yticks(range(0, loads.shape[2], every))
        axes.tick_params(labelsize=TICK_SIZE)
    panels[-1].set_xlabel("step", fontsize=LABEL_SIZE)
    figure.suptitle(
        f"Expert load while training{_which(layers, loads.shape[1])}",
        fontsize=TITLE_SIZE,
        color=INK,
    )
    bar = figure.colorbar(image, ax=list(panels), extend="max", ticks=[0, 0.5, 1, 1.5, 2])
    bar.set_label("tokens ÷ mean over experts  (1 = balanced)", fontsize=LABEL_SIZE)
    bar.ax.tick_params(labelsize=TICK_SIZE)
    return _png(figure)


def routing_picture(passage: bytes, experts: Sequence[Sequence[int]], num_experts: int) -> bytes:
    """`passage` once per layer, each byte on the colour of its first-choice expert."""
    lines = _lines(passage)
    layers = _chosen_layers(len(experts))
    shown = [expert for layer in layers for expert in experts[layer]]
    colours = _colours(shown, num_experts)
    columns = max(SHORTEST_LINE, *(len(line) for line in lines))
    size = (0.4 + CELL_WIDTH * columns, 1.5 + (CELL_HEIGHT * len(lines) + 0.5) * len(layers))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(layers), 1, squeeze=False)[:, 0]
    for axes, layer in zip(panels, layers, strict=True):
        _draw_passage(axes, passage, lines, experts[layer], colours)
        axes.set_xlim(0, columns)
        axes.set_ylim(len(lines), 0)
        axes.set_title(f"layer {layer}", fontsize=LABEL_SIZE, color=INK, loc="left")
    handles = [
        Patch(color=colour, label=f"expert {expert}") for expert, colour in sorted(colours.items())
    ]
    if len(colours) < num_experts:
        handles.append(Patch(color=OTHER_COLOUR, label="other experts"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), columns // 9),
        fontsize=TICK_SIZE,
        frameon=False,
    )
    figure.suptitle(
        f"First-choice expert of each byte{_which(layers, len(experts))}",
        fontsize=TITLE_SIZE,
        color=INK,
    )
    return _png(figure)


def _draw_passage(
    axes: Axes,
    passage: bytes,
    lines: Sequence[range],
    experts: Sequence[int],
    colours: dict[int, str],
) -> None:
    for row, positions in enumerate(lines):
        for column, position in enumerate(positions):
            colour = colours.get(experts[position], OTHER_COLOUR)
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, linewidth=0))
            axes.text(
                column + 0.5,
                row + 0.54,
                one_character(passage[position]),
                family="DejaVu Sans Mono",
                fontsize=CHARACTER_SIZE,
                color=_ink_on(colour),
                ha="center",
                va="center",
                parse_math=False,
            )
    axes.axis("off")


def _lines(passage: bytes) -> list[range]:
    """Positions of `passage` line by line: after each line break, or where a line is full."""
    lines, start = [], 0
    for position, value in enumerate(passage):
        if value == ord("\n") or position + 1 - start == LONGEST_LINE:
            lines.append(range(start, position + 1))
            start = position + 1
    if start < len(passage):
        lines.append(range(start, len(passage)))
    return lines[:MOST_LINES]


def _colours(chosen: Sequence[int], num_experts: int) -> dict[int, str]:
    """A colour per expert; with more experts than colours, only for the most frequent ones."""
    if num_experts <= len(EXPERT_COLOURS):
        return dict(enumerate(EXPERT_COLOURS[:num_experts]))
    frequent = [expert for expert, _ in Counter(chosen).most_common(len(EXPERT_COLOURS))]
    return dict(zip(sorted(frequent), EXPERT_COLOURS, strict=False))


def _ink_on(colour: str) -> str:
    red, green, blue = to_rgb(colour)
    return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"


def _chosen_layers(count: int) -> list[int]:
    """All layers, or `MOST_PANELS` spread evenly from the first to the last."""
    if count <= MOST_PANELS:
        return list(range(count))
    return [round(index * (count - 1) / (MOST_PANELS - 1)) for index in range(MOST_PANELS)]


def _which(layers: Sequence[int], count: int) -> str:
    return "" if len(layers) == count else f" ({len(layers)} of {count} layers)"


def _smooth(values: Tensor) -> Tensor:
    """Mean over the twentieth of the steps around each step, fewer at both ends."""
    reach = len(values) // 40
    sums = torch.cat([values.new_zeros(1), values.cumsum(0)])
    at = torch.arange(len(values))
    starts, ends = (at - reach).clamp(min=0), (at + reach + 1).clamp(max=len(values))
    return (sums[ends] - sums[starts]) / (ends - starts)


def _binned(loads: Tensor) -> Tensor:
    """`[steps, E]` averaged over neighbouring steps down to at most `MOST_COLUMNS` rows."""
    parts = loads.tensor_split(min(len(loads), MOST_COLUMNS))
    return torch.stack([part.mean(dim=0) for part in parts])


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=TITLE_SIZE, color=INK, pad=12)
    axes.tick_params(labelsize=TICK_SIZE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, facecolor="white")
    return buffer.getvalue()
