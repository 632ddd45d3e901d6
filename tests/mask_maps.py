"""Masks of random fan-out and TransformerEngine's mask map, in plain loops, for the tests of the drop-ins."""

import torch
from torch import Tensor


def random_mask(num_tokens: int, num_experts: int, num_pairs: int) -> Tensor:
    """Exactly `num_pairs` ones anywhere: a token has 0 to E experts."""
    mask = torch.zeros(num_tokens * num_experts, dtype=torch.int32)
    mask[torch.randperm(mask.numel())[:num_pairs]] = 1
    return mask.view(num_tokens, num_experts)


def pairs_of(mask: Tensor) -> list[tuple[int, int]]:
    """(token, expert) of every row in order."""
    experts, tokens = mask.t().nonzero(as_tuple=True)
    return list(zip(tokens.tolist(), experts.tolist()))


def listed(row_id_map: Tensor) -> list[list[tuple[int, int]]]:
    """The (row, expert) entries of each token of a mask map; the other cells say nothing."""
    num_experts = row_id_map.shape[1] // 2
    return [
        list(zip(cells[: cells[-1]], cells[num_experts : num_experts + cells[-1]]))
        for cells in row_id_map.tolist()
    ]


def mask_map_of(mask: Tensor) -> list[list[tuple[int, int]]]:
    """What `listed` must give: rows descending."""
    entries: list[list[tuple[int, int]]] = [[] for _ in range(mask.shape[0])]
    for row, (token, expert) in enumerate(pairs_of(mask)):
        entries[token].insert(0, (row, expert))
    return entries
