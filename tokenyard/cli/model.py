"""A small byte-level language model with a Mixture-of-Experts MLP in every layer."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokenyard
from tokenyard.cli.options import HEAD_SIZE, TrainOptions
from tokenyard.nn import MoE, MoEStatistics

VOCABULARY = 256


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of `x` `[B, heads, S, head_size]`, angles in fp32."""
    half = x.shape[-1] // 2
    frequencies = 1000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.num_heads = hidden_size // HEAD_SIZE
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.out = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, HEAD_SIZE)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class Block(nn.Module):
    """Attention, then experts, each on a normalised input and added to the residual stream."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, selection_bias: bool
    ) -> None:
        super().__init__()
        router = {"selection_bias": selection_bias}
        self.attention_norm = nn.RMSNorm(hidden_size)
        self.attention = Attention(hidden_size)
        self.moe_norm = nn.RMSNorm(hidden_size)
        self.moe = MoE(hidden_size, hidden_size, num_experts, top_k, router=router)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEStatistics]:
        x = x + self.attention(self.attention_norm(x))
        out, statistics = self.moe(self.moe_norm(x))
        return x + out, statistics


class ByteModel(nn.Module):
    """Bytes `[B, S]` to logits of the next byte `[B, S, 256]`, with each layer's MoE statistics."""

    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        hidden_size = options.hidden_size
        self.embedding = nn.Embedding(VOCABULARY, hidden_size)
        self.blocks = nn.ModuleList(
            Block(hidden_size, options.experts, options.top_k, options.selection_bias > 0)
            for _ in range(options.layers)
        )
        self.norm = nn.RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, VOCABULARY, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, values: Tensor) -> tuple[Tensor, list[MoEStatistics]]:
        x = self.embedding(values)
        statistics = []
        for block in self.blocks:
            x, of_layer = block(x)
            statistics.append(of_layer)
        return self.head(self.norm(x)), statistics


def build_model(options: TrainOptions) -> ByteModel:
    """The model that `options` describe, with weights that depend on its seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        return ByteModel(options)


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in bits."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return loss / math.log(2)


def auxiliary_losses(statistics: Sequence[MoEStatistics]) -> tuple[Tensor, Tensor]:
    """The layers' mean load-balance loss (1 when balanced) and mean z-loss.

    Of several ranks both average to those of the whole batch: experts are counted over all.
    """
    balance = [
        tokenyard.load_balance_loss(
            of_layer.router_logits.softmax(-1),
            of_layer.topk_indices,
            num_experts=of_layer.router_logits.shape[-1],
            scope="global",
        )
        for of_layer in statistics
    ]
    z = [tokenyard.z_loss(of_layer.router_logits) for of_layer in statistics]
    return torch.stack(balance).mean(), torch.stack(z).mean()


@torch.no_grad()
def update_selection_biases(model: ByteModel, loads: Sequence[Tensor], rate: float) -> None:
    """Move each router's selection bias by `rate` against the loads of its experts, [E] each."""
    for block, of_layer in zip(model.blocks, loads, strict=True):
        assert isinstance(block, Block)
        block.moe.gate.update_selection_bias(of_layer, rate)


@torch.no_grad()
def evaluate(model: ByteModel, windows: Tensor, batch_size: int) -> float:
    """Bits per byte on all but the first byte of each window `[N, S+1]`."""
    total = 0.0
    for batch in windows.split(batch_size):
        logits, _ = model(batch[:, :-1])
        total += bits_per_byte(logits, batch[:, 1:]).item() * len(batch)
    return total / len(windows)


@torch.no_grad()
def generate(
    model: ByteModel,
    prompt: Tensor,
    count: int,
    *,
    window: int,
    seed: int,
    temperature: float = 0.8,
) -> Tensor:
    """`count` bytes drawn one after another behind `prompt` `[P]`; looks back `window` bytes."""
    generator = torch.Generator().manual_seed(seed)
    values = prompt
    for _ in range(count):
        logits, _ = model(values[None, -window:])
        probabilities = (logits[0, -1].float().cpu() / temperature).softmax(-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        values = torch.cat([values, drawn.to(values.device)])
    return values[len(prompt) :]
