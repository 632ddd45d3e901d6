"""Mixture-of-Experts operators for PyTorch: routing, permutation, grouped GEMM, the expert MLP.

Every operator has a plain-PyTorch definition, `<operator>_reference`, that is its specification.
"""

from tokenyard import conventions, nn
from tokenyard.backend import explain, use
from tokenyard.check import ArgumentError
from tokenyard.ops.activation import activation, activation_reference
from tokenyard.ops.expert_mlp import expert_mlp, expert_mlp_reference
from tokenyard.ops.expert_mlp_parts import LoRA
from tokenyard.ops.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_add_weight_gradient,
    grouped_gemm_reference,
)
from tokenyard.ops.losses import load_balance_loss, update_selection_bias, z_loss
from tokenyard.ops.permute import (
    permute,
    permute_reference,
    permute_slots,
    permute_slots_reference,
)
from tokenyard.ops.router_logits import router_logits, router_logits_reference
from tokenyard.ops.sort_chunks import sort_chunks, sort_chunks_reference
from tokenyard.ops.topk import topk, topk_reference
from tokenyard.ops.unpermute import RankTree, unpermute, unpermute_reference
from tokenyard.routing import Routing, route

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "LoRA",
    "RankTree",
    "Routing",
    "activation",
    "activation_reference",
    "conventions",
    "expert_mlp",
    "expert_mlp_reference",
    "explain",
    "grouped_gemm",
    "grouped_gemm_add_weight_gradient",
    "grouped_gemm_reference",
    "load_balance_loss",
    "nn",
    "permute",
    "permute_reference",
    "permute_slots",
    "permute_slots_reference",
    "route",
    "router_logits",
    "router_logits_reference",
    "sort_chunks",
    "sort_chunks_reference",
    "topk",
    "topk_reference",
    "unpermute",
    "unpermute_reference",
    "update_selection_bias",
    "use",
    "z_loss",
]
