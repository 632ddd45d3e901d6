"""Layers: a router, a set of experts, and the two of them as a Mixture-of-Experts block."""

from tokenyard.nn.experts import Experts
from tokenyard.nn.moe import MoE, MoEStatistics, SharedExpert
from tokenyard.nn.router import Router, RouterOutput

__all__ = ["Experts", "MoE", "MoEStatistics", "Router", "RouterOutput", "SharedExpert"]
