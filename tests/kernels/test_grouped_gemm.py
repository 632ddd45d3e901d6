"""The kernels of grouped_gemm in the interpreter, against the definition, with every kind of load."""

import os
from typing import Any

import pytest
import torch
from launches import launched
from torch import Tensor

import tokenyard
from tokenyard import use
from tokenyard.kernels import grouped_gemm as kernels
from tokenyard.kernels import tiles
from tokenyard.kernels.tiles import GemmTile

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter has no bf16 products
COUNTS = [5, 0, 37, 16, 1, 33]
FEW = [1, 0, 2, 0, 0, 1]
NAMES = {
    "many": ["schedule_kernel", "_grouped_gemm_kernel"],
    "few": ["_direct_kernel"],
    "gradient": ["_weight_gradient_kernel"],
}


@pytest.fixture(params=["descriptors", "pointers"], autouse=True)
def loads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way to load, with tiles so small that every size here has several."""

    def small_tile(arch: str, dtype: torch.dtype, bucket: str, *sizes: int) -> tuple[Any, str]:
        rows = int(bucket) if bucket.isdigit() else 32
        return GemmTile(rows, 16, 16, 4, 2), "test"

    monkeypatch.setattr(kernels, "gemm_tile", small_tile)
    monkeypatch.setattr(kernels, "bucket_of", lambda rows: "16" if rows <= 8 else "many")
    if request.param == "pointers":
        monkeypatch.setattr(tiles, "DESCRIPTORS", frozenset())
    return request.param


def offsets_of(counts: list[int], row_alignment: int = 1) -> Tensor:
    sizes = [-(-count // row_alignment) * row_alignment for count in counts]
    return torch.tensor([0, *sizes]).cumsum(0).int()


def routing_of(counts: list[int], row_alignment: int = 1, extra: int = 0) -> tokenyard.Routing:
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    num_rows = int(offsets_of(counts, row_alignment)[-1]) + extra
    return tokenyard.route(
        ids[torch.randperm(len(ids))][:, None],
        len(counts),
        row_alignment=row_alignment,
        num_rows=num_rows,
    )


def agree(
    routing: tokenyard.Routing | Tensor,
    rows_RK: Tensor,
    weight: Tensor,
    bias_EN: Tensor | None,
    layout: Any,
    tolerance: float,
) -> list[str]:
    """Compare forward and every gradient with the definition's; the kernels that ran."""
    given = [rows_RK, weight] if bias_EN is None else [rows_RK, weight, bias_EN]
    leaves = [tensor.detach().requires_grad_() for tensor in given]

    def run() -> tuple[Tensor, ...]:
        bias = None if bias_EN is None else leaves[2]
        out_RN = tokenyard.grouped_gemm(leaves[0], leaves[1], routing, layout=layout, bias=bias)
        grad_RN = torch.randn(out_RN.shape, generator=torch.Generator().manual_seed(1))
        grad_RN = grad_RN.to(out_RN.dtype)
        if isinstance(routing, tokenyard.Routing):  # no one may read a padding row's gradient
            grad_RN[routing.slot_of_row < 0] = torch.nan
        return (out_RN.detach(), *torch.autograd.grad(out_RN, leaves, grad_RN))

    got, names = launched(run)
    with use("reference"):
        want = run()
    for ours, theirs in zip(got, want):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        scale = theirs.float().abs().amax().clamp(min=1.0) if theirs.numel() else 1.0
        torch.testing.assert_close(
            ours.float() / scale, theirs.float() / scale, rtol=tolerance, atol=tolerance
        )
        if isinstance(routing, tokenyard.Routing) and ours.shape[0] == routing.num_rows:
            assert not ours[routing.slot_of_row < 0].any()
    return names


def inputs(
    routing: tokenyard.Routing, size_in: int, size_out: int, layout: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """NaN in the padding rows."""
    rows_RK = torch.randn(routing.num_rows, size_in).to(dtype)
    rows_RK[routing.slot_of_row < 0] = torch.nan
    sizes = (size_out, size_in) if layout == "ENK" else (size_in, size_out)
    weight = torch.randn(routing.num_experts, *sizes).to(dtype) / size_in**0.5
    return rows_RK, weight, torch.randn(routing.num_experts, size_out).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["ENK", "EKN"])
@pytest.mark.parametrize("counts", [COUNTS, FEW], ids=["many", "few"])
def test_forward_and_gradients(
    counts: list[int], layout: str, dtype: torch.dtype, poisoned_memory: None
) -> None:
    kind = "many" if counts is COUNTS else "few"
    for row_alignment, extra in ((1, 0), (8, 24)):
        routing = routing_of(counts, row_alignment, extra)
        rows_RK, weight, bias_EN = inputs(routing, 40, 48, layout, dtype)
        names = agree(routing, rows_RK, weight, None, layout, TOLERANCE[dtype])
        assert {*NAMES[kind], *NAMES["gradient"]} <= {*names}
        names = agree(routing, rows_RK, weight, bias_EN, layout, TOLERANCE[dtype])
        assert "bias_gradient_kernel" in names


@pytest.mark.parametrize("sizes", [(1, 1), (33, 20), (8, 7), (24, 40), (130, 16)], ids=str)
@pytest.mark.parametrize("layout", ["ENK", "EKN"])
def test_any_size(sizes: tuple[int, int], layout: str, poisoned_memory: None) -> None:
    for counts in (COUNTS, FEW):
        routing = routing_of(counts, extra=3)
        agree(routing, *inputs(routing, *sizes, layout, torch.float32), layout, 1e-5)


@pytest.mark.parametrize(
    "counts", [[0, 0, 0], [0, 0, 90], [90, 0, 0], [1], [300], [32, 64, 96], [31, 33, 65]], ids=str
)
def test_empty_and_full_experts(counts: list[int], poisoned_memory: None) -> None:
    for extra in (0, 5):
        routing = routing_of(counts, extra=extra)
        agree(routing, *inputs(routing, 24, 32, "ENK", torch.float32), "ENK", 1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_alone(dtype: torch.dtype) -> None:
    offsets = offsets_of(COUNTS).to(dtype)
    rows_RK, weight = torch.randn(int(offsets[-1]), 24), torch.randn(len(COUNTS), 24, 32)
    agree(offsets, rows_RK, weight, None, "EKN", 1e-5)


def test_no_tokens(poisoned_memory: None) -> None:
    routing = tokenyard.route(torch.zeros(0, 2, dtype=torch.int64), 3)
    agree(routing, *inputs(routing, 24, 32, "ENK", torch.float32), "ENK", 1e-5)


def test_strides(poisoned_memory: None) -> None:
    routing = routing_of(COUNTS)
    rows_RK, weight, _ = inputs(routing, 24, 32, "ENK", torch.float32)
    wide = torch.randn(routing.num_rows, 56)
    columns = torch.randn(24, routing.num_rows).t()
    for strided in (wide[:, 8:32], wide[:, 3:27], columns, rows_RK[:1].expand(len(rows_RK), 24)):
        agree(routing, strided, weight, None, "ENK", 1e-5)
    agree(routing, rows_RK, weight.mT.contiguous().mT, None, "ENK", 1e-5)
    agree(routing, rows_RK, torch.randn(6, 32, 48)[:, :, ::2], None, "ENK", 1e-5)
    agree(routing, rows_RK, torch.randn(6 * 32 * 24 + 1)[1:].view(6, 32, 24), None, "ENK", 1e-5)


def test_expanded_gradient() -> None:
    routing = routing_of(COUNTS)
    rows_RK, weight, _ = inputs(routing, 24, 32, "ENK", torch.float32)
    rows_RK.requires_grad_()
    results = []
    for backend in ("triton", "reference"):
        with use(backend):
            out_RN = tokenyard.grouped_gemm(rows_RK, weight, routing, layout="ENK")
            results += torch.autograd.grad(out_RN.sum(), rows_RK)
    torch.testing.assert_close(*results)


def test_non_finite_rows_stay_in_their_expert(poisoned_memory: None) -> None:
    """Inf and NaN of one expert must not reach another's output or weight gradient through a tile."""
    routing = routing_of([3, 40, 5])
    rows_RK, weight, _ = inputs(routing, 24, 32, "ENK", torch.float32)
    first, end = routing.expert_offsets[1:3].tolist()
    rows_RK[first:end] = torch.inf
    weight.requires_grad_()
    with use("triton"):
        out_RN = tokenyard.grouped_gemm(rows_RK, weight, routing, layout="ENK")
        (d_weight,) = torch.autograd.grad(out_RN, weight, torch.ones_like(out_RN))
    assert out_RN[:first].isfinite().all() and out_RN[end:].isfinite().all()
    assert d_weight[0].isfinite().all() and d_weight[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradient_adds_to_a_buffer(dtype: torch.dtype) -> None:
    routing = routing_of(COUNTS)
    a_RA = torch.randn(routing.num_rows, 24).half()
    b_RB = torch.randn(routing.num_rows, 40).half()
    start = torch.randn(len(COUNTS), 24, 40).to(dtype)
    got = start.clone()
    groups = routing.expert_offsets, routing.tokens_per_expert
    kernels.weight_gradient(a_RA, b_RB, *groups, got, True)
    want = start.float()
    for expert, (first, end) in enumerate(zip(groups[0], groups[0][1:])):
        want[expert] += a_RA[first:end].float().t() @ b_RB[first:end].float()
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=5e-2)
    assert torch.equal(got[1], start[1])  # an empty expert adds nothing
