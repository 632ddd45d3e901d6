"""The drop-in for TransformerEngine's permutation: the index map, and what both kinds of map share."""

import math
from typing import Any

import pytest
import torch
from cases import assert_same_bits
from mask_maps import pairs_of

from tokenyard.compat import transformer_engine as te

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
EXAMPLE = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]])
EXAMPLE_IDS = torch.tensor([[1, 0], [2, 0], [2, 1], [0, 1], [1, 2]])
# the hidden size of the published shapes, divided by 256, so that a CPU takes seconds
SHAPES = [(4096, 7, 16, 2), (4096, 16, 16, 5)]


def test_documented_example() -> None:
    x = torch.arange(5.0)[:, None].expand(5, 2)
    rows, row_id_map = te.moe_permute(x, EXAMPLE, 10)
    assert rows[:, 0].tolist() == [0, 1, 3, 0, 2, 3, 4, 1, 2, 4]
    entries = [[3, 0, 1, 0], [7, 1, 2, 0], [8, 4, 2, 1], [5, 2, 1, 0], [9, 6, 2, 1]]
    assert [[*r[:2], *r[3:5]] for r in row_id_map.tolist()] == entries
    assert row_id_map[:, 6].tolist() == [2] * 5
    assert (row_id_map[:, [2, 5]] == -1).all()
    rows, row_id_map = te.moe_permute(x, EXAMPLE_IDS, 10, map_type="index")
    assert row_id_map.dtype == torch.int32
    assert row_id_map.tolist() == [3, 7, 8, 2, 6, 0, 1, 4, 5, 9]
    assert rows[:, 0].tolist() == [0, 1, 3, 0, 2, 3, 4, 1, 2, 4]


@pytest.mark.parametrize("map_type", ["mask", "index"])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("num_out", [3, 9, 10, 14])
def test_more_and_fewer_rows_than_pairs(map_type: Any, as_tensor: bool, num_out: int) -> None:
    """The tail is dropped and ignored; a longer buffer ends in zero rows."""
    routing_map = EXAMPLE if map_type == "mask" else EXAMPLE_IDS
    pairs = pairs_of(EXAMPLE)[:num_out]
    x = torch.randn(5, 4, requires_grad=True)
    given = torch.tensor(num_out) if as_tensor else num_out
    rows, row_id_map = te.moe_permute(x, routing_map, given, -1, map_type)
    want = torch.zeros(num_out, 4)
    want[: len(pairs)] = x.detach()[[token for token, _ in pairs]]
    assert_same_bits(rows.detach(), want)
    # a row past the pairs belongs to nobody: its gradient goes nowhere, not even as NaN
    grad = torch.randn(num_out, 4)
    grad[len(pairs) :] = math.nan
    (d_x,) = torch.autograd.grad(rows, x, grad)
    want = torch.zeros(5, 4)
    for row, (token, _) in enumerate(pairs):
        want[token] += grad[row]
    torch.testing.assert_close(d_x, want)

    weights = torch.rand(5, 3 if map_type == "mask" else 2, requires_grad=True)
    dirty = rows.detach().clone()
    dirty[len(pairs) :] = math.nan
    dirty.requires_grad_()
    out = te.moe_unpermute(dirty, row_id_map, weights, (5, 4), map_type)
    want_out = torch.zeros(5, 4)
    want_d = torch.zeros_like(weights)
    grad = torch.randn(5, 4)
    for row, (token, expert) in enumerate(pairs):
        k = expert if map_type == "mask" else EXAMPLE_IDS[token].tolist().index(expert)
        want_out[token] += dirty.detach()[row] * weights.detach()[token, k]
        want_d[token, k] = (dirty.detach()[row] * grad[token]).sum()
    torch.testing.assert_close(out.detach(), want_out)
    d_rows, d_weights = torch.autograd.grad(out, (dirty, weights), grad)
    torch.testing.assert_close(d_weights, want_d)
    assert (d_rows[len(pairs) :] == 0).all()


def test_a_negative_number_drops_nothing() -> None:
    """It is the default."""
    x, probs = torch.randn(5, 4), torch.rand(5, 3) + 0.1
    for got, want in (
        (te.moe_permute(x, EXAMPLE), te.moe_permute(x, EXAMPLE, 10)),
        (te.moe_permute(x, EXAMPLE_IDS, map_type="index"), te.moe_permute(x, EXAMPLE)),
        (te.moe_permute_with_probs(x, probs, EXAMPLE)[:2], (x[EXAMPLE.t().nonzero()[:, 1]],)),
    ):
        assert_same_bits(got[0], want[0])
    assert_same_bits(te.moe_permute(x, EXAMPLE, -1)[0], te.moe_permute(x, EXAMPLE, 10)[0])
    for number in (-1, 0):
        rows, _ = te.moe_permute(x, EXAMPLE_IDS, number, map_type="index")
        assert_same_bits(rows, te.moe_permute(x, EXAMPLE, 10)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_index_round_trip_with_gradients(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_tokens, num_experts, hidden, top_k = shape
    ids = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]
    x = torch.randn(num_tokens, hidden).to(dtype).requires_grad_()
    probs = torch.rand(num_tokens, top_k, requires_grad=True)
    rows, row_id_map = te.moe_permute(x, ids.int(), 0, num_tokens, "index")
    slots = ids.flatten().argsort(stable=True)
    assert_same_bits(rows.detach(), x.detach()[slots // top_k])
    row_of_slot = slots.argsort().view(num_tokens, top_k)
    assert row_id_map.tolist() == row_of_slot.t().flatten().tolist()
    rows = rows.detach().requires_grad_()
    out = te.moe_unpermute(rows, row_id_map, merging_probs=probs, map_type="index")
    total = torch.zeros(num_tokens, hidden)
    for k in range(top_k):
        total = total + rows.detach()[row_of_slot[:, k]].float() * probs.detach()[:, k, None]
    assert_same_bits(out.detach(), total.to(dtype))
    grad = torch.randn(out.shape).to(dtype)
    d_rows, d_probs = torch.autograd.grad(out, (rows, probs), grad)
    of_row = probs.detach().flatten()[slots][:, None] * grad[slots // top_k].float()
    assert_same_bits(d_rows, of_row.to(dtype))
    want = (rows.detach()[row_of_slot].double() * grad.double()[:, None]).sum(2)
    torch.testing.assert_close(d_probs.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("id_dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_index_map_with_dropped_and_duplicate_ids(id_dtype: torch.dtype) -> None:
    """-1 has no row; a duplicate keeps both rows; ids need no bound."""
    ids = torch.tensor([[5, -1], [100, 100], [-1, -1], [5, 0]], dtype=id_dtype)
    x = torch.arange(1.0, 5.0)[:, None]
    rows, row_id_map = te.moe_permute(x, ids, 5, map_type="index")
    assert rows.flatten().tolist() == [4, 1, 4, 2, 2]
    assert row_id_map.tolist() == [1, 3, -1, 2, -1, 4, -1, 0]
    assert te.moe_permute(x, ids, 0, map_type="index")[0].flatten().tolist() == [
        4,
        1,
        4,
        2,
        2,
        0,
        0,
        0,
    ]
    probs = torch.tensor(
        [[1.0, math.nan], [2, 3], [math.nan, math.nan], [5, 7]], requires_grad=True
    )
    out = te.moe_unpermute(rows, row_id_map, probs, map_type="index")
    assert out.flatten().tolist() == [1, 10, 0, 48]
    (d_probs,) = torch.autograd.grad(out.sum(), probs)
    assert d_probs.tolist() == [[1, 0], [2, 2], [0, 0], [4, 4]]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_the_largest_id_is_an_id(id_dtype: torch.dtype) -> None:
    most = torch.iinfo(id_dtype).max
    ids = torch.tensor([[-1, most], [most, 0]], dtype=id_dtype)
    _, row_id_map = te.moe_permute(torch.randn(2, 3), ids, map_type="index")
    assert [row >= 0 for row in row_id_map.tolist()] == [False, True, True, True]


def test_probabilities_alone_have_gradients() -> None:
    """Where the rows need none."""
    x, rows = torch.randn(5, 4), torch.randn(10, 4)
    probs = (torch.rand(5, 3) + 0.1).requires_grad_()
    _, permuted_probs, row_id_map = te.moe_permute_with_probs(x, probs, EXAMPLE, 10)
    (d_probs,) = torch.autograd.grad(permuted_probs.sum(), probs)
    assert_same_bits(d_probs, EXAMPLE.float())
    (d_probs,) = torch.autograd.grad(te.moe_unpermute(rows, row_id_map, probs).sum(), probs)
    tokens, experts = zip(*pairs_of(EXAMPLE))
    want = torch.zeros(5, 3).index_put((torch.tensor(tokens), torch.tensor(experts)), rows.sum(1))
    torch.testing.assert_close(d_probs, want)


def _mask_layer(x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    num_out = routing_map.shape[0] * 2  # symbolic
    rows, row_probs, row_id_map = te.moe_permute_with_probs(x, probs, routing_map, num_out)
    return te.moe_unpermute(rows * row_probs[:, None], row_id_map, restore_shape=x.shape)


def _index_layer(x: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    rows, row_id_map = te.moe_permute(x, routing_map, map_type="index")
    return te.moe_unpermute(rows, row_id_map, probs, map_type="index")


@pytest.mark.parametrize("layer", [_mask_layer, _index_layer])
def test_compiles_as_one_graph(layer: Any) -> None:
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (5, 8):
        ids = torch.rand(num_tokens, 4).argsort(dim=1)[:, :2]
        if layer is _mask_layer:
            ids = torch.zeros(num_tokens, 4, dtype=torch.bool).scatter(1, ids, True)
        x = torch.randn(num_tokens, 3, requires_grad=True)
        probs = (torch.rand(ids.shape) + 0.1).requires_grad_()
        results = []
        for function in (compiled, layer):
            out = function(x, ids, probs)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, probs))))
        for got, want in zip(*results):
            torch.testing.assert_close(got, want)


def test_index_map_without_probabilities() -> None:
    """K is 1, as for the peer, unless the shape or topk tells it."""
    x = torch.randn(5, 3)
    rows, row_id_map = te.moe_permute(x, EXAMPLE_IDS, 10, map_type="index")
    out = te.moe_unpermute(rows, row_id_map, map_type="index")
    assert_same_bits(out, torch.cat([x, x]))
    for arguments in ({"restore_shape": (5, 3)}, {"topk": 2}):
        torch.testing.assert_close(
            te.moe_unpermute(rows, row_id_map, map_type="index", **arguments), 2 * x
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_tokens(dtype: torch.dtype) -> None:
    x = torch.zeros(0, 4, dtype=dtype, requires_grad=True)
    probs = torch.zeros(0, 3, requires_grad=True)
    mask = torch.zeros(0, 3, dtype=torch.bool)
    for num_out in (0, 2):
        rows, permuted_probs, row_id_map = te.moe_permute_with_probs(x, probs, mask, num_out)
        assert rows.shape == (num_out, 4) and permuted_probs.shape == (num_out,)
        assert (rows == 0).all() and row_id_map.shape == (0, 7)
        out = te.moe_unpermute(rows, row_id_map, probs, (0, 4))
        assert out.shape == (0, 4)
        d_x, d_probs = torch.autograd.grad(out.sum() + permuted_probs.sum(), (x, probs))
        assert d_x.shape == (0, 4) and d_probs.shape == (0, 3)
    padded = te.moe_permute_and_pad_with_probs(x, probs, mask, torch.zeros(3, dtype=torch.int64), 8)
    assert padded[0].shape == (0, 4) and padded[3] is None
    rows, row_id_map = te.moe_permute(x, torch.zeros(0, 2, dtype=torch.int32), 0, map_type="index")
    assert rows.shape == (0, 4) and row_id_map.shape == (0,)
    assert te.moe_unpermute(rows, row_id_map, torch.zeros(0, 2), map_type="index").shape == (0, 4)


@pytest.mark.parametrize("num_out", [0, 3])
@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_nothing_routed(map_type: Any, num_out: int) -> None:
    """Zeros with a graph, so that every rank of a job runs its backward."""
    mask = map_type == "mask"
    routing_map = torch.zeros(4, 3, dtype=torch.int32) if mask else torch.full((4, 2), -1)
    x = torch.randn(4, 5, requires_grad=True)
    probs = torch.full(routing_map.shape, math.nan, requires_grad=True)
    rows, row_id_map = te.moe_permute(x, routing_map, num_out, map_type=map_type)
    if mask:
        assert rows.shape == (num_out, 5)
    out = te.moe_unpermute(rows, row_id_map, probs, torch.Size((4, 5)), map_type)
    assert out.shape == (4, 5) and (out == 0).all()
    d_x, d_probs = torch.autograd.grad(out.sum(), (x, probs))
    assert (d_x == 0).all() and (d_probs == 0).all()
