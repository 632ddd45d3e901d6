"""Adapters to other libraries, each optional: what is not installed is left out of the comparison.

Permutation of TransformerEngine is reached through its Triton kernels, which its public functions call.
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Functions = dict[str, Callable[[], Any]]


def module(name: str) -> ModuleType | None:
    """The module, or None where its package is not installed."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    return None if found is None else importlib.import_module(name)


def transformer_engine() -> ModuleType | None:
    return module("transformer_engine.pytorch.triton.permutation")


def moe_ops() -> ModuleType | None:
    return module("moe_ops")


def mask_of(topk_indices: Tensor, num_experts: int) -> Tensor:
    mask = torch.zeros(topk_indices.shape[0], num_experts, dtype=torch.int32, device="cuda")
    return mask.scatter_(1, topk_indices.long(), 1)


def torch_route(topk_indices: Tensor) -> Functions:
    def sort() -> Tensor:
        order = topk_indices.flatten().argsort(stable=True)
        return order.argsort()

    return {"torch argsort": sort}


def route(topk_indices: Tensor, num_experts: int) -> Functions:
    functions = torch_route(topk_indices)
    if (te := transformer_engine()) is not None:
        mask = mask_of(topk_indices, num_experts)
        functions["TransformerEngine"] = lambda: te.make_row_id_map(mask, *mask.shape)
    return functions


def permute(x: Tensor, topk_indices: Tensor, num_experts: int) -> Functions:
    num_rows = topk_indices.numel()

    def gather() -> Tensor:
        order = topk_indices.flatten().argsort(stable=True)
        return x.index_select(0, order // topk_indices.shape[1])

    functions: Functions = {"torch argsort + gather": gather}
    if (te := transformer_engine()) is not None:
        mask = mask_of(topk_indices, num_experts)
        row_map = te.make_row_id_map(mask, *mask.shape)
        functions["TransformerEngine, map made"] = lambda: te.permute_with_mask_map(
            x, row_map, None, None, None, *mask.shape, num_rows, x.shape[1], 0
        )
    if (ops := moe_ops()) is not None:
        ids = topk_indices.int()
        functions["moe_ops, map included"] = lambda: ops.permute(x, ids, E=num_experts)
    return functions


def unpermute(rows: Tensor, topk_indices: Tensor, weights: Tensor, num_experts: int) -> Functions:
    num_tokens, top_k = topk_indices.shape
    functions: Functions = {}
    if (te := transformer_engine()) is not None:
        mask = mask_of(topk_indices, num_experts)
        row_map = te.make_row_id_map(mask, *mask.shape)
        dense = torch.zeros(num_tokens, num_experts, device="cuda")
        dense.scatter_(1, topk_indices.long(), weights)
        functions["TransformerEngine"] = lambda: te.unpermute_with_mask_map(
            rows, row_map, dense, None, None, *mask.shape, rows.shape[1]
        )
    if (ops := moe_ops()) is not None:
        row_id_map = k_major_map(topk_indices)
        functions["moe_ops"] = lambda: ops.unpermute_forward(
            rows, row_id_map, weights, num_tokens, top_k
        )
    return functions


def unpermute_backward(
    grad: Tensor, rows: Tensor, topk_indices: Tensor, weights: Tensor, num_experts: int
) -> Functions:
    num_tokens = topk_indices.shape[0]
    functions: Functions = {}
    if (te := transformer_engine()) is not None:
        mask = mask_of(topk_indices, num_experts)
        row_map = te.make_row_id_map(mask, *mask.shape)
        dense = torch.zeros(num_tokens, num_experts, device="cuda")
        dense.scatter_(1, topk_indices.long(), weights)
        functions["TransformerEngine"] = lambda: te.unpermute_with_mask_map_bwd_with_merging_probs(
            grad, row_map, rows, dense, None, *mask.shape, rows.shape[0], rows.shape[1]
        )
    if (ops := moe_ops()) is not None:
        row_id_map = k_major_map(topk_indices)
        functions["moe_ops"] = lambda: ops.unpermute_backward(
            grad, rows, row_id_map, weights, *topk_indices.shape
        )
    return functions


def topk(router_logits: Tensor, top_k: int) -> Functions:
    functions: Functions = {"torch": lambda: router_logits.softmax(-1).topk(top_k)}
    if (ops := moe_ops()) is not None:
        half = router_logits.bfloat16()
        functions["moe_ops, bf16"] = lambda: ops.fused_topk_softmax(half, top_k)
    return functions


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, layout: str) -> Functions:
    """Dense cuBLAS of the same FLOPs among them."""
    matrices = weight.mT if layout == "ENK" else weight
    ends = offsets[1:].contiguous()
    functions: Functions = {
        "torch grouped_mm": lambda: torch._grouped_mm(x, matrices, offs=ends),
        "cuBLAS, dense": lambda: x @ matrices[0],
    }
    if (ops := moe_ops()) is not None:
        functions["moe_ops"] = lambda: ops.grouped_gemm(x, weight, ends, layout == "ENK")
    return functions


def weight_gradient(d_out: Tensor, x: Tensor, offsets: Tensor) -> Functions:
    ends = offsets[1:].contiguous()
    functions: Functions = {"torch grouped_mm": lambda: torch._grouped_mm(d_out.t(), x, offs=ends)}
    if moe_ops() is not None:
        raw = importlib.import_module("moe_ops.grouped_gemm_ops")
        shape = (offsets.shape[0] - 1, d_out.shape[1], x.shape[1])
        weight = x.new_empty(1, 1, 1).expand(shape)  # only its shape matters
        functions["moe_ops"] = lambda: raw.gmm_try_gradB(x, weight, offsets, d_out)
    return functions


def k_major_map(topk_indices: Tensor) -> Tensor:
    order = topk_indices.flatten().argsort(stable=True)
    return order.argsort().view(topk_indices.shape).t().reshape(-1).int()


def installed() -> Iterator[str]:
    """Names of the packages that are there, for the record of a result."""
    for name in ("moe_ops", "transformer_engine"):
        if module(name) is not None:
            yield name
