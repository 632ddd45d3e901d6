"""Permutation by expert ids in plain loops, for the tests of the drop-ins that take ids."""

import random

import torch
from torch import Tensor

EXAMPLE = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
EXAMPLE_ROWS = [0, 1, 3, 0, 2, 3, 4, 1, 2, 4]  # the token of each row
EXAMPLE_A = [1, 3, 6, 0, 5, 7, 8, 2, 4, 9]
EXAMPLE_B = [3, 7, 8, 2, 6, 0, 1, 4, 5, 9]


def random_ids(num_tokens: int, top_k: int, experts: list[int], distinct: bool = False) -> Tensor:
    """[T,K] of the given ids, -1 among them if it is named; duplicates unless `distinct`."""
    choose = random.sample if distinct else lambda ids, k: random.choices(ids, k=k)
    ids = [choose(experts, top_k) for _ in range(num_tokens)]
    return torch.tensor(ids, dtype=torch.int64).view(num_tokens, top_k)


def maps_of(ids: Tensor, num_rows: int | None = None) -> tuple[list[int], list[list[int]]]:
    """(the slot of each row, the row of each slot [T][K]), -1 for none."""
    num_tokens, top_k = ids.shape
    flat = ids.flatten().tolist()
    num_rows = len(flat) if num_rows is None else num_rows
    slots = []
    for expert in sorted({e for e in flat if e >= 0}):
        slots += [slot for slot, chosen in enumerate(flat) if chosen == expert]
    slots = [*slots, *[-1] * num_rows][:num_rows]
    row_of_slot = [[-1] * top_k for _ in range(num_tokens)]
    for row, slot in enumerate(slots):
        if slot >= 0:
            row_of_slot[slot // top_k][slot % top_k] = row
    return slots, row_of_slot


def column_major(row_of_slot: list[list[int]]) -> list[int]:
    """Map B: the row of slot (t,k) at k*T + t."""
    return [row for column in zip(*row_of_slot) for row in column]


def gather(x: Tensor, slots: list[int], top_k: int) -> Tensor:
    """The rows, zero where no slot has one."""
    zero = torch.zeros(1, x.shape[1], dtype=x.dtype)
    return torch.cat([zero[:0], *(x[s // top_k, None] if s >= 0 else zero for s in slots)])


def combine(rows: Tensor, row_of_slot: list[list[int]], weights: Tensor | None = None) -> Tensor:
    """A chain from zero in fp32 (fp64), k ascending, each product rounded, the sum rounded once."""
    acc = torch.float64 if rows.dtype == torch.float64 else torch.float32
    out = torch.zeros(len(row_of_slot), rows.shape[1], dtype=acc)
    for token, of_slot in enumerate(row_of_slot):
        for k, row in enumerate(of_slot):
            if row >= 0:
                term = rows[row].to(acc)
                out[token] += term if weights is None else term * weights[token, k].to(acc)
    return out.to(rows.dtype)


def combine_gradients(
    rows: Tensor, row_of_slot: list[list[int]], weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """(d_rows, rounded as documented; d_weights in fp64), zero where there is no row."""
    acc = torch.float64 if rows.dtype == torch.float64 else torch.float32
    d_rows, d_weights = torch.zeros_like(rows), torch.zeros(weights.shape, dtype=torch.float64)
    for token, of_slot in enumerate(row_of_slot):
        for k, row in enumerate(of_slot):
            if row >= 0:
                d_rows[row] = (grad[token].to(acc) * weights[token, k].to(acc)).to(rows.dtype)
                d_weights[token, k] = (rows[row].double() * grad[token].double()).sum()
    return d_rows, d_weights


def multiply(rows: Tensor, weight_EKN: Tensor, sizes: list[int]) -> Tensor:
    """The grouped GEMM row by row; exact for small integers."""
    out = torch.zeros(rows.shape[0], weight_EKN.shape[2], dtype=torch.float64)
    row = 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            out[row] = (rows[row].double()[:, None] * weight_EKN[expert].double()).sum(0)
            row += 1
    return out.to(rows.dtype)


def multiply_transposed(a: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    """A_e^T B_e [E,M,N] row by row; exact for small integers."""
    out = torch.zeros(len(sizes), a.shape[1], b.shape[1], dtype=torch.float64)
    row = 0
    for expert, size in enumerate(sizes):
        for _ in range(size):
            out[expert] += a[row].double()[:, None] * b[row].double()
            row += 1
    return out.to(a.dtype)
