"""Group metadata: where each expert's rows begin and end, as other libraries state it."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokenyard import check
from tokenyard.routing import Routing


def check_ints(
    function: str, argument: str, value: Tensor, shape: list[int | str], like: Tensor | None = None
) -> None:
    device = None if like is None else like.device
    operator = f"conventions.{function}"
    check.tensor(operator, argument, value, shape, dtypes=check.INTEGER_DTYPES, device=device)


def checked(function: str, routing: Routing) -> Routing:
    if not isinstance(routing, Routing):
        check.fail(f"conventions.{function}", "routing", "a Routing", check.describe(routing))
    return routing


def to_int32(values: Tensor) -> Tensor:
    """Values that int32 does not hold become its bounds: none wraps into the valid range."""
    return values.long().clamp(-check.INT32_MAX - 1, check.INT32_MAX).to(torch.int32)


def aligned_offsets(function: str, counts: Tensor, row_alignment: int) -> Tensor:
    check.at_least(f"conventions.{function}", "row_alignment", row_alignment, 1)
    aligned = (to_int32(counts).long() + (row_alignment - 1)) // row_alignment * row_alignment
    return pad(aligned.cumsum(0), (1, 0))


def to_group_ends(routing: Routing) -> Tensor:
    """[E] int32, the row after each expert's range: scattermoe, torch `grouped_mm`, moe_ops.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_group_ends(routing).tolist()
    [3, 7, 10]
    """
    return checked("to_group_ends", routing).expert_offsets[1:]


def from_group_ends(group_ends: Tensor) -> Tensor:
    """Ends [E] -> expert_offsets [E+1] int32.

    >>> from_group_ends(torch.tensor([3, 7, 10])).tolist()
    [0, 3, 7, 10]
    """
    check_ints("from_group_ends", "group_ends", group_ends, ["E"])
    return pad(to_int32(group_ends), (1, 0))


def to_group_counts(
    routing: Routing, *, padded: bool = False, device: torch.device | str | None = None
) -> Tensor:
    """[E] int64, rows of each expert: xtuner, unsloth; with device="cpu" d9d and grouped_gemm.

    `padded` counts padding rows too, as is right for a buffer that has them.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_group_counts(routing, device="cpu").tolist()
    [3, 4, 3]
    """
    routing = checked("to_group_counts", routing)
    counts = routing.expert_offsets.diff() if padded else routing.tokens_per_expert
    return counts.to(device=device, dtype=torch.int64)


def from_group_counts(
    group_counts: Tensor, *, row_alignment: int = 1, device: torch.device | str | None = None
) -> Tensor:
    """Counts [E] -> expert_offsets [E+1] int32, aligned, on `device` (default: that of counts).

    >>> from_group_counts(torch.tensor([3, 4, 3])).tolist()
    [0, 3, 7, 10]
    """
    check_ints("from_group_counts", "group_counts", group_counts, ["E"])
    counts = group_counts.to(device=device, non_blocking=True)
    return to_int32(aligned_offsets("from_group_counts", counts, row_alignment))


def to_padded_bins(routing: Routing) -> tuple[Tensor, Tensor]:
    """megablocks `padded_bins` and `bins`: [E] int32 ends of the aligned ranges, and of the valid
    rows as if they were not padded.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> [ends.tolist() for ends in to_padded_bins(routing)]
    [[3, 7, 10], [3, 7, 10]]
    """
    counts = checked("to_padded_bins", routing).tokens_per_expert
    return routing.expert_offsets[1:], counts.cumsum(0, dtype=torch.int32)


def from_padded_bins(padded_bins: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Both [E] -> expert_offsets [E+1] and tokens_per_expert [E], int32.

    >>> results = from_padded_bins(torch.tensor([4, 8, 12]), torch.tensor([3, 7, 10]))
    >>> [result.tolist() for result in results]
    [[0, 4, 8, 12], [3, 4, 3]]
    """
    check_ints("from_padded_bins", "padded_bins", padded_bins, ["E"])
    check_ints("from_padded_bins", "bins", bins, list(padded_bins.shape), padded_bins)
    return from_group_ends(padded_bins), to_int32(from_group_ends(bins).long().diff())


def to_expert_of_row(routing: Routing) -> Tensor:
    """[R] int32, the expert of each row, -1 = padding: DeepGEMM `m_indices`, contiguous layout.

    >>> import torch, tokenyard
    >>> routing = tokenyard.route(torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]]), 3)
    >>> to_expert_of_row(routing).tolist()
    [0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    """
    return checked("to_expert_of_row", routing).expert_of_row


def from_expert_of_row(
    expert_of_row: Tensor, num_experts: int, *, row_alignment: int = 1
) -> tuple[Tensor, Tensor]:
    """[R], ascending but for -1 -> expert_offsets [E+1] and tokens_per_expert [E], int32.

    The last range ends at the first multiple of `row_alignment` after its valid rows.

    >>> results = from_expert_of_row(torch.tensor([0, 0, 0, -1, 2, 2, -1, -1]), 3, row_alignment=2)
    >>> [result.tolist() for result in results]
    [[0, 4, 4, 6], [3, 0, 2]]
    """
    check_ints("from_expert_of_row", "expert_of_row", expert_of_row, ["R"])
    check.at_least("conventions.from_expert_of_row", "num_experts", num_experts, 1)
    check.at_least("conventions.from_expert_of_row", "row_alignment", row_alignment, 1)
    experts, device = expert_of_row.long(), expert_of_row.device
    valid = (experts >= 0) & (experts < num_experts)
    valid_before = pad(valid.cumsum(0), (1, 0))
    rows = torch.arange(1, expert_of_row.shape[0] + 1, device=device)
    end = pad(torch.where(valid, rows, 0), (1, 0)).amax()
    end = (end + row_alignment - 1) // row_alignment * row_alignment
    latest = torch.where(valid, experts, -1).cummax(0).values
    starts = torch.searchsorted(latest, torch.arange(num_experts, device=device))
    offsets = torch.minimum(pad(starts, (0, 1), value=check.INT32_MAX), end)
    offsets = offsets.clamp(max=expert_of_row.shape[0])
    return offsets.to(torch.int32), valid_before[offsets].diff().to(torch.int32)
