"""Reorder the chunks of a buffer, such as rank-major rows to expert-major and back.

out = concat of chunk[order[0]], chunk[order[1]], ...; rows past the sum of the sizes stay where they are.
d_x is the same move with the inverse order, so one kernel serves both directions.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenyard import backend, check
from tokenyard.ops.rows import check_moved, gather_rows
from tokenyard.registration import Operator


def sort_chunks_reference(x: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    """The definition of `sort_chunks`, of tensors on the device of x."""
    return gather_rows(x, _source_row(x.shape[0], split_sizes.long(), order.long()))


def _source_row(num_rows: int, split_sizes: Tensor, order: Tensor) -> Tensor:
    """[N] the row of x that each row of the result comes from."""
    rows = torch.arange(num_rows, device=split_sizes.device)
    if order.numel() == 0:
        return rows
    sizes = split_sizes[order]
    ends = sizes.cumsum(0)
    chunk = torch.searchsorted(ends, rows, right=True).clamp(max=order.numel() - 1)
    start = (split_sizes.cumsum(0) - split_sizes)[order]
    moved = rows + (start - (ends - sizes))[chunk]
    return torch.where(rows < ends[-1], moved, rows)


def _forward(x: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    kernels = backend.kernels("sort_chunks", x)
    if kernels is not None:
        return kernels.sort_chunks(x, split_sizes, order)
    return sort_chunks_reference(x, split_sizes, order)


def _fake(x: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward(grad: Tensor, split_sizes: Tensor, order: Tensor) -> Tensor:
    order = order.long()
    return _forward(grad, split_sizes[order], order.argsort())


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _gradient(ctx: Any, backward: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return backward(grad, *ctx.saved_tensors), None, None


_sort_chunks = Operator(
    "sort_chunks",
    _forward,
    _fake,
    save=_save,
    gradient=_gradient,
    backward=_backward,
    backward_fake=_fake,
)


def sort_chunks(
    x: Tensor, split_sizes: Tensor | Sequence[int], order: Tensor | Sequence[int]
) -> Tensor:
    """Put the chunks of x into the given order: x [N,...] any real dtype -> the same shape.

    split_sizes   [C] integers, rows of each chunk; their sum is at most N
    order         [C] integers, a permutation: the chunk that comes first, second, ...

    Both may be lists, or tensors on the CPU or on the device of x. Values are checked only where
    they can be read at no cost (lists and CPU tensors). Differentiable in x; saves the two lists.
    Raises ArgumentError.
    """
    check.tensor("sort_chunks", "x", x)
    check.at_least("sort_chunks", "x.dim()", x.dim(), 1)
    check_moved("sort_chunks", "x", x)
    sizes = _integers("split_sizes", split_sizes)
    chunks = _integers("order", order)
    if sizes.shape != chunks.shape:
        check.fail("sort_chunks", "order", f"shape {list(sizes.shape)}", check.describe(chunks))
    if not torch.compiler.is_compiling():
        _check_values(x.shape[0], sizes, chunks)
    return _sort_chunks(x, sizes.to(x.device), chunks.to(x.device))


def _integers(argument: str, value: Tensor | Sequence[int]) -> Tensor:
    if isinstance(value, Tensor):
        result = value
    else:  # a list of fractions stays one, and is refused
        result = torch.tensor(value, dtype=None if len(value) else torch.int64)
    check.tensor("sort_chunks", argument, result, ["C"], dtypes=check.INTEGER_DTYPES)
    return result


def _check_values(num_rows: int, split_sizes: Tensor, order: Tensor) -> None:
    if split_sizes.is_cpu and type(split_sizes) is Tensor:
        sizes = split_sizes.tolist()
        if any(size < 0 for size in sizes) or sum(sizes) > num_rows:
            expected = f"sizes >= 0 whose sum is at most {num_rows}"
            check.fail("sort_chunks", "split_sizes", expected, sizes)
    if order.is_cpu and type(order) is Tensor:
        chunks = order.tolist()
        if sorted(chunks) != list(range(len(chunks))):
            expected = f"a permutation of 0..{len(chunks) - 1}"
            check.fail("sort_chunks", "order", expected, chunks)
