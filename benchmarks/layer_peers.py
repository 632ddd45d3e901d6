"""Adapters to other MoE layers, each optional, and the layer composed of plain torch operators.

All compute one function, with the weights of one `Layer`. Routing weights are the softmax over the K selected
logits, in fp32; logits are those of a bf16 linear layer.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.peers import module
from benchmarks.shapes import Shape


@dataclass(frozen=True)
class Layer:
    """x [T,H], gate [E,H], w_gate_up [E,2I,H], w_down [E,H,I], which require gradients; d_out [T,H]."""

    shape: Shape
    x: Tensor
    gate: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    d_out: Tensor


@dataclass(frozen=True)
class Side:
    """One implementation of a layer.

    layer            whose function it computes
    forward          x -> out; keeps what its gradient needs if gradients are recorded
    weights          gate, w_gate_up and w_down as leaves that `forward` differentiates
    interleaved      w_gate_up is, its rows taking turns: gate, up, gate, up, ...
    same_function    up to rounding, so that values and gradients can be compared
    """

    layer: Layer
    forward: Callable[[Tensor], Tensor]
    weights: tuple[Tensor, Tensor, Tensor]
    interleaved: bool = False
    same_function: bool = True


class Unavailable(Exception):
    """Why a peer takes no part."""


def choose(x: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """topk_weights [T,K] fp32, topk_indices [T,K] int64."""
    logits, ids = F.linear(x, layer.gate).topk(layer.shape.K)
    return logits.float().softmax(-1), ids


def sort(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """expert [R] and slot [R] of each row, and the row after the last of each expert [E]; all int64."""
    experts, slots = ids.flatten().sort(stable=True)
    every = torch.arange(num_experts, device=ids.device)
    return experts, slots, torch.searchsorted(experts, every, right=True)


def swiglu(z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up


def composed(layer: Layer) -> Side:
    shape = layer.shape
    multiply: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def forward(x: Tensor) -> Tensor:
        weights, ids = choose(x, layer)
        _, slots, ends = sort(ids, shape.E)
        tokens, ends = slots // shape.K, ends.int()
        a = swiglu(multiply(x[tokens], layer.w_gate_up.mT, offs=ends))
        y = multiply(a, layer.w_down.mT, offs=ends)
        weighted = y * weights.flatten()[slots, None].to(y.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighted)

    return Side(layer, forward, (layer.gate, layer.w_gate_up, layer.w_down))


@cache
def _sum_of_sonic() -> tuple[Any, list[Any]]:
    """Its Triton kernel that sums K rows, and the tiles that it would try, for minutes."""
    file = importlib.import_module("sonicmoe.functional.reduction_over_k_gather")
    kernel = file.token_gather_sum_kernel
    return kernel, list(kernel.configs)


def sonic(layer: Layer) -> Side:
    """With gate and up interleaved, as by its default, so on a copy. Its first calls tune its GEMMs."""
    library = module("sonicmoe")
    if library is None:
        raise Unavailable("sonic-moe is not installed")
    shape = layer.shape
    kernel, tiles = _sum_of_sonic()
    spanned = 1 << (shape.K - 1).bit_length()  # just the K rows
    kernel.configs = [tile for tile in tiles if tile.kwargs["BLOCK_K"] == spanned] or tiles
    pairs = layer.w_gate_up.detach().unflatten(1, (2, shape.I)).transpose(1, 2)
    w_gate_up = pairs.reshape_as(layer.w_gate_up).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        out, _, _ = library.moe_TC_softmax_topk_layer(
            x,
            layer.gate,
            w_gate_up.permute(1, 2, 0),
            None,
            layer.w_down.permute(1, 2, 0),
            None,
            shape.K,
            torch.cuda.current_stream().cuda_stream,
            is_inference_mode_enabled=not torch.is_grad_enabled(),
        )
        return out

    return Side(layer, forward, (layer.gate, w_gate_up, layer.w_down), interleaved=True)


def scatter(layer: Layer) -> Side:
    """Sorted by torch: its own way to sort waits for the GPU."""
    library = module("scattermoe")
    if library is None:
        raise Unavailable("scattermoe is not installed")
    shape = layer.shape
    if layer.w_gate_up.numel() >= 2**31:
        raise Unavailable("scattermoe computes offsets into weights in int32, too small here")

    def forward(x: Tensor) -> Tensor:
        weights, ids = choose(x, layer)
        groups = sort(ids, shape.E)
        z = library.parallel_linear(
            x, layer.w_gate_up.permute(0, 2, 1), shape.K, *groups, grouped_out=True
        )
        return library.parallel_linear(
            swiglu(z),
            layer.w_down.permute(0, 2, 1),
            1,
            *groups,
            grouped_in=True,
            gates=weights.to(x.dtype),
        )

    return Side(layer, forward, (layer.gate, layer.w_gate_up, layer.w_down))


def liger(layer: Layer) -> Side:
    """With its one fixed tile: its tuner takes minutes for each shape."""
    os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")  # read as its module is imported
    library = module("liger_kernel.ops.fused_moe")
    if library is None:
        raise Unavailable("liger-kernel is not installed")

    def forward(x: Tensor) -> Tensor:
        weights, ids = choose(x, layer)
        arguments = x, layer.w_gate_up, layer.w_down, ids.int(), weights
        return library.LigerFusedMoEFunction.apply(*arguments)

    return Side(layer, forward, (layer.gate, layer.w_gate_up, layer.w_down))


COMPOSED = "torch grouped_mm, composed"
PEERS: dict[str, Callable[[Layer], Side]] = {
    "SonicMoE": sonic,
    "ScatterMoE": scatter,
    "Liger": liger,
}
PACKAGES = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "scattermoe", "liger-kernel")


def reason(failure: Exception) -> str:
    """In a line."""
    if isinstance(failure, Unavailable):
        return str(failure)
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else 'no message'}"


def made(name: str, layer: Layer) -> Side | str:
    """The side, or why there is none: a peer that fails to import is one that is not there."""
    try:
        return PEERS[name](layer)
    except Exception as failure:
        return reason(failure)
