"""The kernels in Gluon against those in Triton, bit for bit, on groups of every kind."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenyard.kernels import expert_mlp, grouped_gemm, groups

pytestmark = pytest.mark.gpu
# rows that each expert has, of these with a token, and rows after the last expert
GROUPS = {
    "ragged": ([200, 0, 1, 384, 130, 77], [190, 0, 1, 384, 0, 77], 37),
    "one row": ([1], [1], 0),
    "no rows": ([0, 0, 0], [0, 0, 0], 300),
    "many tiles": ([5000, 77, 3000, 0, 9000, 128], [5000, 77, 2000, 0, 9000, 128], 100),
    "all in one": ([0, 4000, 0], [0, 4000, 0], 0),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if groups.hopper_kernels(torch.device("cuda", torch.cuda.current_device())) is None:
        pytest.skip("needs sm_90 and a Triton whose Gluon is known")
    for module in (expert_mlp, grouped_gemm):
        monkeypatch.setattr(module, "bucket_of", lambda rows_per_expert: "many")
    yield


def in_triton(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (expert_mlp, grouped_gemm):
            patch.setattr(module, "hopper_kernels", lambda device: None)
        return call()


def assert_same_bits(call: Callable[[], list[Tensor]]) -> None:
    want = in_triton(call)
    for _ in range(2):
        assert all(map(torch.equal, call(), want))


def grouped(name: str) -> tuple[int, int, tuple[Tensor, Tensor], Tensor]:
    """Rows, experts, offsets and counts, and which rows hold a token."""
    lengths, counts, after = GROUPS[name]
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    num_rows = sum(lengths) + after
    owned = torch.zeros(num_rows, dtype=torch.bool, device="cuda")
    for first, count in zip(offsets.tolist(), counts):
        owned[first : first + count] = True
    return num_rows, len(lengths), (offsets, torch.tensor(counts, device="cuda").int()), owned


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(512, 512), (72, 264), (1536, 1024)], ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_products_and_weight_gradient(
    name: str, sizes: tuple[int, int], dtype: torch.dtype, poisoned_memory: None
) -> None:
    """Rows without a token are NaN, and reach nothing."""
    num_rows, num_experts, groups, owned = grouped(name)
    size_in, size_out = sizes
    x, g = randn(num_rows, size_in, dtype=dtype), randn(num_rows, size_out, dtype=dtype)
    x[~owned] = g[~owned] = float("nan")
    weight, bias = (
        randn(num_experts, size_out, size_in, dtype=dtype),
        randn(num_experts, size_out, dtype=dtype),
    )
    transposed = weight.mT.contiguous()
    assert_same_bits(lambda: [grouped_gemm.grouped_gemm(x, weight, bias, *groups, "ENK")])
    assert_same_bits(lambda: [grouped_gemm.grouped_gemm(x, transposed, None, *groups, "EKN")])

    def weight_gradient() -> list[Tensor]:
        out = torch.empty_like(weight)
        grouped_gemm.weight_gradient(g, x, *groups, out, False)
        return [out]

    assert_same_bits(weight_gradient)


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("name", GROUPS)
def test_up(name: str, kind: Any, poisoned_memory: None) -> None:
    num_rows, num_experts, groups, owned = grouped(name)
    x = randn(num_rows, 512, dtype=torch.bfloat16)
    x[~owned] = float("nan")
    weight = randn(num_experts, 512, 512, dtype=torch.bfloat16) / 16
    bias = randn(num_experts, 512, dtype=torch.bfloat16)

    def up(keep: bool) -> list[Tensor]:
        way = True, kind, "concatenated", num_rows, keep
        return list(expert_mlp.up(x, None, 1, weight, bias, *groups, *way))

    for keep in (True, False):
        assert_same_bits(lambda keep=keep: up(keep))
