"""Copy every token to the rows of its experts.

rows[r]   = x[slot_of_row[r] // K]         zero in padding rows; bit-exact, any real dtype
d_x[t]    = sum over k ascending of acc(d_rows[row_of_slot[t,k]]), rounded once

permute_slots moves one value per slot in the same way:
rows[r]   = values[slot_of_row[r]]         zero in padding rows
d_values[s] = d_rows[row_of_slot[s]]       zero where the slot has no row
"""

from typing import Any

from torch import Tensor

from tokenyard import backend, check
from tokenyard.ops.rows import check_moved, check_routing, gather_rows, sum_rows
from tokenyard.registration import Operator
from tokenyard.routing import Routing


def permute_reference(x: Tensor, routing: Routing) -> Tensor:
    """The definition of `permute`."""
    return gather_rows(x, routing.token_of_row)


def permute_slots_reference(values: Tensor, routing: Routing) -> Tensor:
    """The definition of `permute_slots`."""
    return gather_rows(values.flatten(), routing.slot_of_row)


def _permute_forward(x: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> Tensor:
    kernels = backend.kernels("permute", x)
    if kernels is not None:
        return kernels.permute(x, row_of_slot, slot_of_row)
    return gather_rows(x, slot_of_row // row_of_slot.shape[1])


def _permute_fake(x: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> Tensor:
    return x.new_empty(slot_of_row.shape[0], x.shape[1])


def _permute_backward(d_rows: Tensor, row_of_slot: Tensor) -> Tensor:
    kernels = backend.kernels("unpermute", d_rows)
    if kernels is not None:
        return kernels.sum_rows(d_rows, row_of_slot)
    return sum_rows(d_rows, row_of_slot).to(d_rows.dtype)


def _permute_backward_fake(d_rows: Tensor, row_of_slot: Tensor) -> Tensor:
    return d_rows.new_empty(row_of_slot.shape[0], d_rows.shape[1])


def _permute_save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _permute_gradient(ctx: Any, backward: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
    (row_of_slot,) = ctx.saved_tensors
    return backward(d_rows, row_of_slot), None, None


_permute = Operator(
    "permute",
    _permute_forward,
    _permute_fake,
    save=_permute_save,
    gradient=_permute_gradient,
    backward=_permute_backward,
    backward_fake=_permute_backward_fake,
)


def permute(x: Tensor, routing: Routing) -> Tensor:
    """Copy every token to the rows of its experts: x [T,D] -> rows [R,D].

    x may have any real dtype and any strides (scales and fp8 bytes travel too); padding rows are zero.
    Differentiable in x where its dtype is; saves `routing.row_of_slot`. Raises ArgumentError.
    """
    check.tensor("permute", "x", x)
    check_routing("permute", routing, x.device)
    check.tensor("permute", "x", x, [routing.num_tokens, "D"])
    check_moved("permute", "x", x)
    return _permute(x, routing.row_of_slot, routing.slot_of_row)


def _slots_forward(values: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> Tensor:
    kernels = backend.kernels("permute_slots", values)
    if kernels is not None:
        return kernels.gather_values(values.flatten(), slot_of_row)
    return gather_rows(values.flatten(), slot_of_row)


def _slots_fake(values: Tensor, row_of_slot: Tensor, slot_of_row: Tensor) -> Tensor:
    return values.new_empty(slot_of_row.shape[0])


def _slots_backward(d_rows: Tensor, row_of_slot: Tensor) -> Tensor:
    kernels = backend.kernels("permute_slots", d_rows)
    if kernels is not None:
        return kernels.gather_values(d_rows, row_of_slot.flatten()).view(row_of_slot.shape)
    return gather_rows(d_rows, row_of_slot.flatten()).view(row_of_slot.shape)


def _slots_backward_fake(d_rows: Tensor, row_of_slot: Tensor) -> Tensor:
    return d_rows.new_empty(row_of_slot.shape)


_permute_slots = Operator(
    "permute_slots",
    _slots_forward,
    _slots_fake,
    save=_permute_save,
    gradient=_permute_gradient,
    backward=_slots_backward,
    backward_fake=_slots_backward_fake,
)


def permute_slots(values: Tensor, routing: Routing) -> Tensor:
    """Bring one value per slot, such as its routing weight, to the slot's row: [T,K] -> [R].

    values may have any real dtype and any strides. Padding rows get zero; the gradient of a slot
    without a row is exactly zero. Saves `routing.row_of_slot`. Raises ArgumentError.
    """
    check.tensor("permute_slots", "values", values)
    check_routing("permute_slots", routing, values.device)
    check.tensor("permute_slots", "values", values, [routing.num_tokens, routing.top_k])
    check_moved("permute_slots", "values", values)
    return _permute_slots(values, routing.row_of_slot, routing.slot_of_row)
