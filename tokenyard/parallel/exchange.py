"""Rows from every rank to every rank, as bits, differentiably.

exchange_rows      out = the rows that rank 0 sent here, those of rank 1, ...; d_x is the same move back
exchange_choices   the same for the weights and the ids of rows, in one message
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from tokenyard.parallel.failures import wait
from tokenyard.registration import Operator

_CARRIERS = (torch.int64, torch.int32, torch.uint8)
"""What every backend moves; the widest first, since some count elements in 32 bits."""


def _bits(x: Tensor) -> Tensor:
    """x [N,...] contiguous -> the same bits as [N,M] in a dtype that every backend moves."""
    flat = x.flatten(1) if x.dim() > 1 else x[:, None]
    row_bytes = flat.shape[1] * x.element_size()
    carrier = next(dtype for dtype in _CARRIERS if row_bytes % dtype.itemsize == 0)
    if x.storage_offset() * x.element_size() % carrier.itemsize:
        flat = flat.clone()
    return flat.view(carrier)


def _rows_forward(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(sum(receive), *x.shape[1:])
    if x.shape[1:].numel() == 0:
        return out
    members = _resolve_process_group(group)  # type: ignore[arg-type]
    work = dist.all_to_all_single(_bits(out), _bits(x), receive, send, group=members, async_op=True)
    wait(members, work, x.device)
    return out


def _rows_fake(x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    return x.new_empty(sum(receive), *x.shape[1:])


def _rows_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.journey = inputs[-3:]


def _rows_gradient(ctx: Any, backward: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    send, receive, group = ctx.journey
    return backward(grad, receive, send, group), None, None, None


exchange_rows = Operator(
    "exchange_rows",
    _rows_forward,
    _rows_fake,
    save=_rows_save,
    gradient=_rows_gradient,
    backward=_rows_forward,
    backward_fake=_rows_fake,
)
"""exchange_rows(x [N,...], send, receive, group): rows for each rank, in turn, and from each.

x has any dtype; send and receive [W] are numbers of rows, group a group's name."""


def _choices_forward(
    weights: Tensor, ids: Tensor, send: list[int], receive: list[int], group: str
) -> tuple[Tensor, Tensor]:
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in (weights, ids)], 1)
    packed = _rows_forward(packed, send, receive, group)
    parts = packed.split([packed.shape[1] - 4 * ids.shape[1], 4 * ids.shape[1]], 1)
    got_weights, got_ids = (
        part.contiguous().view(like.dtype) for part, like in zip(parts, (weights, ids))
    )
    return got_weights, got_ids


def _choices_fake(
    weights: Tensor, ids: Tensor, send: list[int], receive: list[int], group: str
) -> tuple[Tensor, Tensor]:
    return weights.new_empty(sum(receive), weights.shape[1]), ids.new_empty(
        sum(receive), ids.shape[1]
    )


def _choices_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.journey = inputs[-3:]
    ctx.mark_non_differentiable(output[1])


def _choices_gradient(
    ctx: Any, backward: Any, d_weights: Tensor, _: Any
) -> tuple[Tensor | None, ...]:
    send, receive, group = ctx.journey
    return backward(d_weights, receive, send, group), None, None, None, None


exchange_choices = Operator(
    "exchange_choices",
    _choices_forward,
    _choices_fake,
    save=_choices_save,
    gradient=_choices_gradient,
    backward=_rows_forward,
    backward_fake=_rows_fake,
)
"""exchange_choices(weights [N,K] any dtype, ids [N,K] int32, send, receive, group) -> the same of others."""
