"""The permutation family and the router: one function per operator, each a generator of cases."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import tokenyard
from benchmarks import measure, peers
from benchmarks.case import Case
from benchmarks.shapes import Shape
from tokenyard.kernels import permute as permute_kernels
from tokenyard.kernels import topk as topk_kernels
from tokenyard.kernels import unpermute as unpermute_kernels


def _choices(shape: Shape) -> tuple[Tensor, Tensor]:
    """Router logits and the ids of random, near-balanced routing."""
    logits = torch.randn(shape.T, shape.E, device="cuda")
    return logits, logits.topk(shape.K).indices


def _same(got: Tensor, expected: Tensor) -> None:
    """Bit for bit; on the device where both are, else on the CPU."""
    if got.device != expected.device:
        got, expected = got.cpu(), expected.cpu()
    assert torch.equal(got, expected), "bits differ from the definition"


def route(shape: Shape) -> Iterator[Case]:
    _, ids = _choices(shape)

    def check() -> None:
        got, expected = tokenyard.route(ids, shape.E), tokenyard.route(ids.cpu(), shape.E)
        _same(got.row_of_slot, expected.row_of_slot)
        _same(got.slot_of_row, expected.slot_of_row)
        got.validate()

    yield Case("route", lambda: tokenyard.route(ids, shape.E), check, peers.route(ids, shape.E))


def permute(shape: Shape) -> Iterator[Case]:
    _, ids = _choices(shape)
    x = torch.randn(shape.T, shape.H, device="cuda", dtype=torch.bfloat16)
    routing = tokenyard.route(ids, shape.E)
    written = routing.num_rows * shape.H * 2

    def check() -> None:
        _same(tokenyard.permute(x, routing), x[routing.token_of_row.long()])

    yield Case(
        "permute",
        lambda: permute_kernels.permute(x, routing.row_of_slot, routing.slot_of_row),
        check,
        peers.permute(x, ids, shape.E),
        shape.T * shape.H * 2 + written,
        written,
    )


def unpermute(shape: Shape) -> Iterator[Case]:
    _, ids = _choices(shape)
    routing = tokenyard.route(ids, shape.E)
    rows = torch.randn(routing.num_rows, shape.H, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(shape.T, shape.K, device="cuda")
    grad = torch.randn(shape.T, shape.H, device="cuda", dtype=torch.bfloat16)
    rows_bytes, tokens_bytes = rows.numel() * 2, grad.numel() * 2

    for order in ("slot", "expert", "expert_descending"):

        def check(order: str = order) -> None:
            got = tokenyard.unpermute(rows, routing, weights, reduction=order)
            some = slice(0, min(shape.T, 2048))
            small = tokenyard.route(ids[some].cpu(), shape.E)
            picked = rows[routing.row_of_slot[some].flatten().long()].cpu()
            mine = torch.empty_like(picked)
            mine[small.row_of_slot.flatten().long()] = picked
            expected = tokenyard.unpermute(mine, small, weights[some].cpu(), reduction=order)
            _same(got[some], expected)

        def run(order: str = order) -> Tensor:
            maps = (routing.row_of_slot, routing.topk_indices, shape.E)
            return unpermute_kernels.combine(rows, weights, *maps, order, 0, "fp32", "fp32")

        others = peers.unpermute(rows, ids, weights, shape.E) if order == "slot" else {}
        yield Case(
            f"unpermute {order}", run, check, others, rows_bytes + tokens_bytes, tokens_bytes
        )

    def backward() -> tuple[Tensor, Tensor]:
        return unpermute_kernels.unpermute_backward(
            grad, rows, weights, routing.row_of_slot, routing.slot_of_row
        )

    def check_backward() -> None:
        d_rows, d_weights = backward()
        again, d_weights_again = backward()
        token, slot = routing.token_of_row.long(), routing.slot_of_row.long()
        expected = grad[token].float() * weights.flatten()[slot][:, None]
        _same(d_rows, expected.bfloat16())
        dots = (rows.double() * grad[token].double()).sum(1)
        expected_weights = torch.zeros_like(weights.double()).flatten()
        expected_weights[slot] = dots
        error = measure.relative_error(d_weights.flatten(), expected_weights)
        assert error < 1e-5, f"weight gradient is off by {error:.1e}"
        _same(d_rows, again)
        _same(d_weights, d_weights_again)

    yield Case(
        "unpermute backward",
        backward,
        check_backward,
        peers.unpermute_backward(grad, rows, ids, weights, shape.E),
        2 * rows_bytes + tokens_bytes,
        rows_bytes,
    )


def topk(shape: Shape) -> Iterator[Case]:
    logits, _ = _choices(shape)
    groups = dict(num_groups=8, topk_groups=4, group_score="sum_of_top2")
    bias = torch.randn(shape.E, device="cuda") * 0.1
    options = {
        "topk softmax": {},
        "topk sigmoid, bias, groups": dict(
            score="sigmoid", selection_bias=bias, normalize="sum", scale=2.5, **groups
        ),
    }
    if shape.E % 8 or shape.K > shape.E // 2:
        del options["topk sigmoid, bias, groups"]
    for name, chosen in options.items():

        def run(chosen: dict = chosen) -> tuple[Tensor, Tensor]:
            return tokenyard.topk(logits, shape.K, **chosen)

        def check(chosen: dict = chosen) -> None:
            on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in chosen.items()}
            weights, ids = run(chosen)
            expected, expected_ids = tokenyard.topk(logits.cpu(), shape.K, **on_cpu)
            agree = (ids.cpu() == expected_ids).all(1)
            assert agree.float().mean() > 0.9999, "choices differ"
            torch.testing.assert_close(weights.cpu()[agree], expected[agree], rtol=1e-5, atol=1e-6)

        others = peers.topk(logits, shape.K) if not chosen else {}
        yield Case(name, run, check, others)

    weights, ids = tokenyard.topk(logits, shape.K)
    d_weights = torch.randn_like(weights)

    def backward() -> Tensor:
        return topk_kernels.topk_backward(
            d_weights, logits, ids, "softmax", 0.0, "none", 1.0, 0.0, "add", 1.0
        )

    def check_backward() -> None:
        exact = logits.double().requires_grad_()
        chosen = exact.softmax(-1).gather(1, ids.long())
        (expected,) = torch.autograd.grad(chosen, exact, d_weights.double())
        error = measure.relative_error(backward(), expected)
        assert error < 1e-5, f"gradient is off by {error:.1e}"

    yield Case("topk softmax backward", backward, check_backward)


def sort_chunks(shape: Shape) -> Iterator[Case]:
    num_rows, num_chunks = shape.T * shape.K, 8 * max(shape.E // 8, 1)
    x = torch.randn(num_rows, shape.H, device="cuda", dtype=torch.bfloat16)
    cuts = torch.randint(0, num_rows, (num_chunks - 1,)).sort().values.tolist()
    sizes = torch.tensor([0, *cuts, num_rows]).diff()
    order = torch.arange(num_chunks).view(8, -1).t().flatten()
    sizes_gpu, order_gpu = sizes.cuda(), order.cuda()

    def check() -> None:
        chunks = x.split(sizes.tolist())
        _same(tokenyard.sort_chunks(x, sizes_gpu, order_gpu), torch.cat([chunks[i] for i in order]))

    def by_torch() -> Tensor:
        chunks = x.split(sizes.tolist())
        return torch.cat([chunks[i] for i in order.tolist()])

    yield Case(
        "sort_chunks",
        lambda: tokenyard.sort_chunks(x, sizes_gpu, order_gpu),
        check,
        {"torch split + cat": by_torch},
        2 * x.numel() * 2,
        x.numel() * 2,
    )


OPERATORS = {
    "route": route,
    "permute": permute,
    "unpermute": unpermute,
    "topk": topk,
    "sort_chunks": sort_chunks,
}


def decode() -> dict[str, float]:
    """route + permute + unpermute in one CUDA graph, E 256, K 8, H 7168: microseconds by T."""
    return {f"T {num_tokens}": _decode(num_tokens) for num_tokens in (1, 16, 128)}


def _decode(num_tokens: int) -> float:
    ids = torch.randn(num_tokens, 256, device="cuda").topk(8).indices
    x = torch.randn(num_tokens, 7168, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(num_tokens, 8, device="cuda")

    def step() -> Tensor:
        routing = tokenyard.route(ids, 256)
        return tokenyard.unpermute(tokenyard.permute(x, routing), routing, weights)

    return measure.graph_microseconds(step)


def host() -> dict[str, float]:
    """Host microseconds of an eager call with gradient, T 16, E 64, K 8, H 2048."""
    ids = torch.randn(16, 64, device="cuda").topk(8).indices
    routing = tokenyard.route(ids, 64)
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rows = tokenyard.permute(x, routing).detach().requires_grad_()
    weights = torch.rand(16, 8, device="cuda", requires_grad=True)
    logits = torch.randn(16, 64, device="cuda", requires_grad=True)
    calls: dict[str, Callable[[], object]] = {
        "route": lambda: tokenyard.route(ids, 64),
        "permute": lambda: tokenyard.permute(x, routing),
        "permute_slots": lambda: tokenyard.permute_slots(weights, routing),
        "unpermute": lambda: tokenyard.unpermute(rows, routing, weights),
        "topk": lambda: tokenyard.topk(logits, 8),
    }
    return {name: measure.host_microseconds(call) for name, call in calls.items()}
