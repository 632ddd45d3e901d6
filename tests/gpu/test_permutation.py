"""The permutation family on a GPU, at real sizes: the bits of the definition, streams, graphs, no sync."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from cases import assert_same_bits
from torch import Tensor

import tokenyard
from tokenyard import RankTree, Routing, conventions
from tokenyard.ops.rows import sum_rows
from tokenyard.ops.unpermute import Reduction

pytestmark = pytest.mark.gpu

FIELDS = (
    *("topk_indices", "row_of_slot", "slot_of_row", "expert_offsets", "tokens_per_expert"),
    "num_dropped",
)
# (T, H, E, K, row_alignment)
SHAPES = [
    (4096, 7168, 256, 8, 1),
    (1025, 2880, 128, 4, 128),
    (777, 4096, 8, 2, 16),
    (63, 7168, 256, 8, 1),
    (300, 20, 60, 22, 1),
    (2000, 8, 72, 8, 8),
    (1, 16500, 384, 8, 1),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """A function that turns every later synchronisation into an error, until the test ends."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def choices(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """[T,K] on the GPU: distinct experts, the first one preferred, one slot in eight dropped."""
    scores_TE = torch.rand(num_tokens, num_experts, device="cuda")
    scores_TE[:, 0] += 0.5
    ids_TK = scores_TE.topk(top_k, dim=1).indices
    return ids_TK.masked_fill(torch.rand(num_tokens, top_k, device="cuda") < 0.125, -1)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def rows_for(routing: Routing, width: int, dtype: torch.dtype) -> Tensor:
    """NaN in the padding rows."""
    rows_RH = randn(routing.num_rows, width, dtype=dtype)
    return rows_RH.masked_fill_((routing.slot_of_row < 0)[:, None], torch.nan)


def weights_for(routing: Routing) -> Tensor:
    """NaN where a slot has no row."""
    weights_TK = torch.rand(routing.num_tokens, routing.top_k, device="cuda")
    return weights_TK.masked_fill_(routing.row_of_slot < 0, torch.nan)


def assert_same_routing(got: Routing, want: Routing) -> None:
    for field in FIELDS:
        assert_same_bits(getattr(got, field).cpu(), getattr(want, field).cpu())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_has_the_bits_of_the_definition(shape: tuple[int, ...]) -> None:
    num_tokens, _, num_experts, top_k, row_alignment = shape
    ids_TK = choices(num_tokens, num_experts, top_k)
    for options in ({}, {"capacity": 20}, {"num_rows": 64 * row_alignment}):
        for ids in (ids_TK, ids_TK.int(), ids_TK.T.contiguous().T):
            got = tokenyard.route(ids, num_experts, row_alignment=row_alignment, **options)
            want = tokenyard.route(ids.cpu(), num_experts, row_alignment=row_alignment, **options)
            assert_same_routing(got, want)


@pytest.mark.parametrize("num_slots", [4095, 4096, 4097, 131_073, 600_000])
@pytest.mark.parametrize("num_experts", [1, 8, 63, 64, 256, 1024])
def test_route_about_its_block_boundaries(num_slots: int, num_experts: int) -> None:
    ids_TK = torch.randint(-1, num_experts + 1, (num_slots, 1), device="cuda")
    got = tokenyard.route(ids_TK, num_experts, row_alignment=8)
    assert_same_routing(got, tokenyard.route(ids_TK.cpu(), num_experts, row_alignment=8))


@pytest.mark.parametrize(
    "shape", [(4096, 256, 8), (777, 60, 60), (1, 384, 8), (70_000, 8, 2)], ids=str
)
def test_route_mask_has_the_bits_of_the_definition(
    shape: tuple[int, int, int], poisoned_memory: None
) -> None:
    num_tokens, num_experts, top_k = shape
    mask_TE = torch.rand(num_tokens, num_experts) < 1.5 * top_k / num_experts * torch.rand(
        num_tokens, 1
    )
    for mask in (mask_TE.cuda(), mask_TE.int().cuda(), mask_TE.t().contiguous().cuda().t()):
        got = conventions.from_routing_map(mask, top_k=top_k)
        want = conventions.from_routing_map(mask_TE, top_k=top_k)
        for field in FIELDS:
            assert_same_bits(getattr(got, field).cpu(), getattr(want, field))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.int64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_permute_has_the_bits_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, poisoned_memory: None
) -> None:
    num_tokens, width, num_experts, top_k, row_alignment = shape
    ids_TK = choices(num_tokens, num_experts, top_k)
    routing = tokenyard.route(ids_TK, num_experts, row_alignment=row_alignment)
    on_cpu = routing.to("cpu")
    x_TH = randn(num_tokens, width).mul(9).to(dtype)
    rows_RH = tokenyard.permute(x_TH, routing)
    want_RH = tokenyard.permute(x_TH.cpu(), on_cpu)
    assert torch.equal(rows_RH.cpu().view(torch.uint8), want_RH.view(torch.uint8))
    values_TK = randn(num_tokens, top_k).mul(9).to(dtype)
    values_R = tokenyard.permute_slots(values_TK, routing)
    want_R = tokenyard.permute_slots(values_TK.cpu(), on_cpu)
    assert torch.equal(values_R.cpu().view(torch.uint8), want_R.view(torch.uint8))

    sizes_E = routing.tokens_per_expert
    order_E = torch.randperm(num_experts, device="cuda")
    sorted_RH = tokenyard.sort_chunks(rows_RH, sizes_E, order_E)
    want_RH = tokenyard.sort_chunks(want_RH, sizes_E.cpu(), order_E.cpu())
    assert torch.equal(sorted_RH.cpu().view(torch.uint8), want_RH.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpermute_has_the_bits_of_the_definition(
    shape: tuple[int, ...], dtype: torch.dtype, poisoned_memory: None
) -> None:
    num_tokens, width, num_experts, top_k, row_alignment = shape
    ids_TK = choices(num_tokens, num_experts, top_k)
    routing = tokenyard.route(ids_TK, num_experts, row_alignment=row_alignment)
    rows_RH, weights_TK = rows_for(routing, width, dtype), weights_for(routing)
    on_cpu, rows_on_cpu, weights_on_cpu = routing.to("cpu"), rows_RH.cpu(), weights_TK.cpu()
    reductions: list[Reduction] = ["slot", "expert", "expert_descending", RankTree(4)]
    reductions += [RankTree(2, "fp64", "fp64"), RankTree(4, "fp32", "fp64")]
    reductions += [RankTree(4, "fma_bf16"), RankTree(1, "fma_bf16", "fp64")]
    for reduction in reductions:
        got = tokenyard.unpermute(rows_RH, routing, weights_TK, reduction=reduction)
        want = tokenyard.unpermute(rows_on_cpu, on_cpu, weights_on_cpu, reduction=reduction)
        assert_same_bits(got.cpu(), want)
    for reduction in ("slot", "expert", RankTree(4)):
        got = tokenyard.unpermute(rows_RH, routing, reduction=reduction)
        want = tokenyard.unpermute(rows_on_cpu, on_cpu, reduction=reduction)
        assert_same_bits(got.cpu(), want)


def gradients(
    x_TH: Tensor, weights_TK: Tensor, routing: Routing, grad_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of tokens and weights: both directions of every operator."""
    x_TH, weights_TK = x_TH.detach().requires_grad_(), weights_TK.detach().requires_grad_()
    out_TH = tokenyard.unpermute(tokenyard.permute(x_TH, routing), routing, weights_TK)
    return out_TH.detach(), *torch.autograd.grad(out_TH, (x_TH, weights_TK), grad_TH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, poisoned_memory: None) -> None:
    """Of tokens, bit for bit; of weights, a sum in another order than the definition's."""
    num_tokens, width, num_experts, top_k, row_alignment = shape
    ids_TK = choices(num_tokens, num_experts, top_k)
    routing = tokenyard.route(ids_TK, num_experts, row_alignment=row_alignment)
    x_TH, weights_TK = randn(num_tokens, width, dtype=dtype), weights_for(routing)
    for grad_TH in (
        randn(num_tokens, width, dtype=dtype),
        torch.ones((), device="cuda", dtype=dtype).expand(num_tokens, width),
        randn(num_tokens, width + 8, dtype=dtype)[:, 3 : width + 3],
    ):
        got = gradients(x_TH, weights_TK, routing, grad_TH)
        want = gradients(x_TH.cpu(), weights_TK.cpu(), routing.to("cpu"), grad_TH.cpu())
        assert_same_bits(got[0].cpu(), want[0])
        assert_same_bits(got[1].cpu(), want[1])
        bound = 1e-4 * width**0.5
        torch.testing.assert_close(got[2].cpu(), want[2], rtol=1e-4, atol=bound)
        assert not got[2][routing.row_of_slot < 0].any()


@pytest.mark.parametrize("weighted", [True, False])
def test_offsets_past_int32(weighted: bool) -> None:
    """320,000 rows of 7168: more elements than int32 counts, in both directions."""
    num_tokens, top_k, num_experts, width = 40_000, 8, 256, 7168
    free = torch.cuda.mem_get_info()[0]
    if free < 20 << 30:
        pytest.skip(f"needs 20 GiB of GPU memory, {free >> 30} GiB are free")
    ids_TK = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k, dim=1).indices
    routing = tokenyard.route(ids_TK, num_experts)
    assert routing.num_rows * width > 2**31

    x_TH = randn(num_tokens, width, dtype=torch.bfloat16).requires_grad_()
    weights_TK = torch.rand(num_tokens, top_k, device="cuda")
    rows_RH = tokenyard.permute(x_TH, routing)
    past = 2**31 // width  # the first row that lies past it, but for a part
    parts = ((0, 64), (past - 99, past + 99), (routing.num_rows - 500, routing.num_rows))
    some_rows = torch.cat([torch.arange(*part, device="cuda") for part in parts])
    token_of_row = routing.token_of_row.long()
    with torch.no_grad():
        assert torch.equal(rows_RH[some_rows], x_TH[token_of_row[some_rows]])

    leaf_RH = rows_RH.detach().requires_grad_()
    weights_TK.requires_grad_(weighted)
    out_TH = tokenyard.unpermute(leaf_RH, routing, weights_TK if weighted else None)
    tokens = token_of_row[some_rows].unique()
    row_TK = routing.row_of_slot.long()[tokens]

    def summed(rows_RH: Tensor, weights: Tensor | None) -> Tensor:
        """The definition, of those tokens alone."""
        local_TK = torch.arange(row_TK.numel()).view(row_TK.shape)
        picked = rows_RH.detach()[row_TK.flatten()].cpu()
        weights = None if weights is None else weights.detach()[tokens].cpu()
        return sum_rows(picked, local_TK, weights).to(picked.dtype)

    want_TH = summed(leaf_RH, weights_TK if weighted else None)
    assert_same_bits(out_TH.detach()[tokens].cpu(), want_TH)

    grad_TH = randn(num_tokens, width, dtype=torch.bfloat16)
    inputs = (leaf_RH, weights_TK) if weighted else (leaf_RH,)
    d_rows_RH, *d_weights = torch.autograd.grad(out_TH, inputs, grad_TH)
    want_RH = grad_TH[token_of_row[some_rows]].float()
    if weighted:
        slots = routing.slot_of_row.long()[some_rows]
        want_RH = want_RH * weights_TK.detach().flatten()[slots, None]
        want_TK = (leaf_RH.detach()[row_TK].float() * grad_TH[tokens, None].float()).sum(2)
        torch.testing.assert_close(d_weights[0][tokens], want_TK, rtol=1e-4, atol=1e-2)
    assert torch.equal(d_rows_RH[some_rows], want_RH.bfloat16())
    del out_TH, leaf_RH

    (d_x_TH,) = torch.autograd.grad(rows_RH, x_TH, d_rows_RH)
    assert_same_bits(d_x_TH[tokens].cpu(), summed(d_rows_RH, None))
    chunks_E = routing.tokens_per_expert
    back_E = torch.arange(num_experts - 1, -1, -1, device="cuda")
    sorted_RH = tokenyard.sort_chunks(d_rows_RH, chunks_E, back_E)
    assert torch.equal(sorted_RH[: chunks_E[-1]], d_rows_RH[-int(chunks_E[-1]) :])
    assert torch.equal(sorted_RH[-int(chunks_E[0]) :], d_rows_RH[: chunks_E[0]])


def everything(
    ids_TK: Tensor, x_TH: Tensor, weights_TK: Tensor, grad_TH: Tensor, num_experts: int
) -> tuple[Tensor, ...]:
    """Route, permute, sort and unpermute, with gradients."""
    routing = tokenyard.route(ids_TK, num_experts, row_alignment=8)
    rows_RH = tokenyard.permute(x_TH.detach(), routing)
    order_E = torch.arange(num_experts - 1, -1, -1, device=x_TH.device)
    sorted_RH = tokenyard.sort_chunks(rows_RH, routing.tokens_per_expert, order_E)
    tree_TH = tokenyard.unpermute(rows_RH, routing, weights_TK, reduction=RankTree(4, "fp64"))
    return (
        routing.slot_of_row,
        tokenyard.permute_slots(weights_TK, routing),
        sorted_RH,
        tree_TH,
        *gradients(x_TH, weights_TK, routing, grad_TH),
    )


def inputs_for_everything(
    num_tokens: int, width: int = 2048, num_experts: int = 64, top_k: int = 6
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    return (
        choices(num_tokens, num_experts, top_k),
        randn(num_tokens, width, dtype=torch.bfloat16),
        torch.rand(num_tokens, top_k, device="cuda"),
        randn(num_tokens, width, dtype=torch.bfloat16),
        num_experts,
    )


def assert_all_equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want):
        assert_same_bits(one.cpu(), other.cpu())


@pytest.mark.parametrize("num_tokens", [100, 3000])
def test_runs_repeat_bit_for_bit(num_tokens: int) -> None:
    """Also beside other work, and with programs spread otherwise over the processors."""
    inputs = inputs_for_everything(num_tokens)
    first = everything(*inputs)
    other_work, square = torch.cuda.Stream(), randn(4096, 4096)
    for _ in range(5):
        with torch.cuda.stream(other_work):
            square @ square
        assert_all_equal(everything(*inputs), first)


def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    """Its sums and gradients, in any batch."""
    ids_TK, x_TH, weights_TK, grad_TH, num_experts = inputs_for_everything(3000)
    together = everything(ids_TK, x_TH, weights_TK, grad_TH, num_experts)[3:]
    for tokens in ([5], [2999, 1], random.sample(range(3000), 700)):
        at = torch.tensor(tokens, device="cuda")
        alone = everything(ids_TK[at], x_TH[at], weights_TK[at], grad_TH[at], num_experts)[3:]
        assert_all_equal(alone, tuple(value[at] for value in together))


@pytest.mark.parametrize("num_tokens", [100, 3000])
def test_no_operator_waits_for_the_gpu(num_tokens: int, no_sync: Callable[[], None]) -> None:
    inputs = inputs_for_everything(num_tokens)
    everything(*inputs)  # compiles
    torch.cuda.synchronize()
    no_sync()
    everything(*inputs)


@pytest.mark.parametrize("num_tokens", [100, 3000])
def test_side_stream(num_tokens: int) -> None:
    """Work goes to the current stream: its inputs come late there, and its first launch as well."""
    want = everything(*inputs_for_everything(num_tokens))  # compiles, elsewhere
    inputs = inputs_for_everything(num_tokens)
    want = everything(*inputs)
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(value) for value in inputs[:4]]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        for mine, value in zip(late, inputs):
            mine.copy_(value)
        got = everything(late[0], late[1], late[2], late[3], inputs[4])
    assert not stream.query(), "the stream was idle before it was asked: nothing is tested"
    stream.synchronize()
    assert_all_equal(got, want)


@pytest.mark.parametrize("num_tokens", [100, 3000])
def test_graph_replays_with_another_routing(num_tokens: int) -> None:
    static = inputs_for_everything(num_tokens)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            everything(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = everything(*static)
    for one_expert in (False, False, True):
        fresh = inputs_for_everything(num_tokens)
        if one_expert:
            fresh[0].fill_(-1)[:, 2] = 7
        for mine, value in zip(static[:4], fresh):
            mine.copy_(value)
        for output in outputs:
            output.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert_all_equal(outputs, everything(*fresh))


def test_second_gpu_while_the_first_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = inputs_for_everything(500)
    want = everything(*inputs)  # each kernel is loaded on the first GPU before the second
    moved = [value.to("cuda:1") for value in inputs[:4]]
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        got = everything(moved[0], moved[1], moved[2], moved[3], inputs[4])
        assert all(value.device == torch.device("cuda:1") for value in got)
        assert_all_equal(got, want)
    assert torch.cuda.current_device() == 0
    assert_all_equal(everything(*inputs), want)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()

    def run(ids_TK: Tensor, x_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        routing = tokenyard.route(ids_TK, 64)
        rows_RH = tokenyard.permute(x_TH, routing) * 2
        return tokenyard.unpermute(rows_RH, routing, weights_TK), routing.expert_offsets

    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for num_tokens in (300, 301, 4000):
        ids_TK, x_TH, weights_TK, grad_TH, _ = inputs_for_everything(num_tokens)
        leaves = x_TH.requires_grad_(), weights_TK.requires_grad_()
        results = []
        for function in (compiled, run):
            out_TH, offsets = function(ids_TK, *leaves)
            results.append(
                (out_TH.detach(), offsets, *torch.autograd.grad(out_TH, leaves, grad_TH))
            )
        assert_all_equal(*results)


@pytest.mark.parametrize("num_rows", [None, 40])
def test_zero_tokens(num_rows: int | None, poisoned_memory: None) -> None:
    for ids_TK in (
        torch.zeros(0, 4, dtype=torch.int64, device="cuda"),
        torch.full((9, 4), -1, device="cuda"),  # nothing routed
    ):
        routing = tokenyard.route(ids_TK, 8, num_rows=num_rows)
        assert_same_routing(routing, tokenyard.route(ids_TK.cpu(), 8, num_rows=num_rows))
        num_tokens = ids_TK.shape[0]
        x_TH = randn(num_tokens, 512).requires_grad_()
        weights_TK = torch.rand(num_tokens, 4, device="cuda").requires_grad_()
        rows_RH = tokenyard.permute(x_TH, routing)
        assert rows_RH.shape == (routing.num_rows, 512) and not rows_RH.any()
        out_TH = tokenyard.unpermute(rows_RH, routing, weights_TK)
        assert out_TH.shape == (num_tokens, 512) and not out_TH.any()
        out_TH.sum().backward()
        assert x_TH.grad is not None and not x_TH.grad.any()
        assert weights_TK.grad is not None and not weights_TK.grad.any()
        chunks = tokenyard.sort_chunks(
            rows_RH, routing.tokens_per_expert, torch.arange(8, device="cuda")
        )
        assert_same_bits(chunks, rows_RH)
    weights, ids = tokenyard.topk(randn(0, 8), 2)
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "options"),
    [
        (256, 8, {"score": "sigmoid", "num_groups": 8, "topk_groups": 4, "normalize": "sum"}),
        (128, 4, {"score": "softmax_of_selected"}),
        (60, 4, {"score": "softmax", "softcap": 10.0}),
        (8, 2, {"score": "sqrtsoftplus", "normalize": "norm", "norm_p": 2.0}),
        (384, 22, {"score": "identity"}),
    ],
    ids=str,
)
def test_topk(num_experts: int, top_k: int, options: dict, poisoned_memory: None) -> None:
    """Choices as the definition makes them, ties and NaN among them; weights and gradients close."""
    logits_TE = torch.randn(4099, num_experts)
    if options["score"] != "identity":
        logits_TE[1], logits_TE[2] = torch.nan, -torch.inf
        logits_TE[3, : num_experts - 1] = torch.nan
    logits_TE[4:50] = torch.randint(0, 3, (46, num_experts)).float()
    logits_TE[50] = -0.0
    grad_TK = torch.randn(4099, top_k)

    def run(device: str) -> list[Tensor]:
        leaf_TE = logits_TE.to(device).requires_grad_()
        weights_TK, ids_TK = tokenyard.topk(leaf_TE, top_k, **options)
        (d_logits_TE,) = torch.autograd.grad(weights_TK, leaf_TE, grad_TK.to(device))
        return [ids_TK.cpu(), weights_TK.detach().cpu(), d_logits_TE.cpu()]

    got, want = run("cuda"), run("cpu")
    if {"num_groups", "softcap"} & set(
        options
    ):  # values that the two devices may round differently
        differ_T = (got[0] != want[0]).any(1)
        assert differ_T.sum() <= 8
        got, want = ([value[~differ_T] for value in values] for values in (got, want))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[2], want[2], rtol=1e-3, atol=1e-5)
    assert all(map(torch.equal, run("cuda"), run("cuda")))
