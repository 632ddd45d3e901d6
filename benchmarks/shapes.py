"""Layers of real models: T tokens, K choices, E experts, H hidden size, I expert width."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    name: str
    T: int
    K: int
    E: int
    H: int
    I: int  # noqa: E741


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v3", 8192, 8, 256, 7168, 2048),
        Shape("deepseek-v3-32k", 32768, 8, 256, 7168, 2048),
        Shape("qwen3-30b-16k", 16384, 8, 128, 2048, 768),
        Shape("mixtral-8x7b", 8192, 2, 8, 4096, 14336),
        Shape("olmoe", 16384, 8, 64, 2048, 1024),
        Shape("qwen3-30b-a3b", 32768, 8, 128, 2048, 768),
        Shape("sonic-30b", 32768, 8, 128, 4096, 1024),
        Shape("sonic-7b-fine", 24576, 8, 128, 1536, 256),
    )
}
SINGLE = ("deepseek-v3", "deepseek-v3-32k", "qwen3-30b-16k", "mixtral-8x7b", "olmoe")
"""Of which single operators are timed by default."""

LAYERS = ("mixtral-8x7b", "olmoe", "qwen3-30b-a3b", "sonic-30b", "sonic-7b-fine", "deepseek-v3")
"""Of which the whole layer is."""
