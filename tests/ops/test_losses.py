"""The balancing losses and the selection-bias update against literal loops."""

import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tokenyard import ArgumentError, load_balance_loss, update_selection_bias, z_loss

NAN, INF = float("nan"), float("inf")


def balance_loop(probs_TE: Tensor, ids_TK: Tensor, tokens: list[int]) -> float:
    """E * sum f * P over the given tokens; 0 for none."""
    experts = probs_TE.shape[1]
    chosen = [e for t in tokens for e in ids_TK[t].tolist() if 0 <= e < experts]
    loss = 0.0
    for e in range(experts):
        f = chosen.count(e) / max(len(chosen), 1)
        loss += experts * f * sum(float(probs_TE[t, e]) for t in tokens) / max(len(tokens), 1)
    return loss


def drawn(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    probs_TE = torch.randn(tokens, experts, dtype=torch.float64).softmax(1)
    return probs_TE, torch.randint(-1, experts + 1, (tokens, top_k))


@pytest.mark.parametrize("experts", [1, 3, 6, 60, 160])
@pytest.mark.parametrize("masked", [False, True])
def test_load_balance_against_a_loop(experts: int, masked: bool) -> None:
    for dtype in (torch.int8, torch.int32, torch.int64):
        probs_TE, ids_TK = drawn(12, experts, 3)
        ids_TK = ids_TK.clamp(max=127)
        mask_T = torch.rand(12) < 0.6 if masked else None
        kept = [t for t in range(12) if mask_T is None or mask_T[t]]
        options: dict[str, Any] = {"num_experts": experts, "token_mask": mask_T}
        got = load_balance_loss(probs_TE, ids_TK.to(dtype), **options)
        assert got.shape == () and got.dtype == torch.float64
        assert math.isclose(got, balance_loop(probs_TE, ids_TK, kept), abs_tol=1e-12)

        got = load_balance_loss(probs_TE, ids_TK, scope="sequence", sequence_length=4, **options)
        parts = [[t for t in kept if t // 4 == s] for s in range(3)]
        want = sum(balance_loop(probs_TE, ids_TK, part) for part in parts) / 3
        assert math.isclose(got, want, abs_tol=1e-12)


@pytest.mark.parametrize("scope", ["batch", "sequence", "global"])
def test_balanced_is_one_and_collapsed_is_the_number_of_experts(scope: Any) -> None:
    options: dict[str, Any] = {"num_experts": 4, "scope": scope, "sequence_length": 4}
    ids_TK = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]).repeat(3, 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        loss = load_balance_loss(torch.full((12, 4), 0.25, dtype=dtype), ids_TK, **options)
        assert loss.dtype == torch.float32 and loss == 1
        one_hot_TE = torch.eye(4, dtype=dtype)[[2] * 12]
        assert load_balance_loss(one_hot_TE, torch.full((12, 1), 2), **options) == 4


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_of_transformers_is_k_times_ours(top_k: int, masked: bool) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits_TE = torch.randn(15, 6)
    mask_BS = torch.rand(3, 5) < 0.7 if masked else None
    theirs = load_balancing_loss_func((logits_TE,), 6, top_k, mask_BS)
    ids_TK = logits_TE.topk(top_k).indices
    mask_T = None if mask_BS is None else mask_BS.flatten()
    ours = load_balance_loss(logits_TE.softmax(1), ids_TK, num_experts=6, token_mask=mask_T)
    torch.testing.assert_close(theirs, top_k * ours)


def test_masked_tokens_leak_nothing() -> None:
    mask_T = torch.tensor([True, False, True, False])
    for poison in (NAN, INF):
        probs_TE, ids_TK = torch.rand(4, 3), torch.tensor([[0], [1], [2], [1]])
        probs_TE[~mask_T] = poison
        probs_TE.requires_grad_()
        load_balance_loss(probs_TE, ids_TK, num_experts=3, token_mask=mask_T).backward()
        assert probs_TE.grad is not None
        assert probs_TE.grad.isfinite().all() and not probs_TE.grad[~mask_T].any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_masked_logits_leak_nothing(poison: float) -> None:
    mask_T = torch.tensor([True, False, True, False])
    logits_TE = torch.randn(4, 3)
    logits_TE[~mask_T] = poison
    want = z_loss(logits_TE[mask_T])
    logits_TE.requires_grad_()
    loss = z_loss(logits_TE, token_mask=mask_T)
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert logits_TE.grad is not None
    assert logits_TE.grad.isfinite().all() and not logits_TE.grad[~mask_T].any()


@pytest.mark.parametrize("scope", ["batch", "sequence", "global"])
def test_no_tokens_or_all_masked(scope: Any) -> None:
    for tokens in (0, 6):
        mask_T = torch.zeros(tokens, dtype=torch.bool)
        logits_TE = torch.randn(tokens, 5, requires_grad=True)
        ids_TK = torch.zeros(tokens, 2, dtype=torch.int32)
        options: dict[str, Any] = {"num_experts": 5, "scope": scope, "sequence_length": 3}
        balance = load_balance_loss(logits_TE.softmax(1), ids_TK, token_mask=mask_T, **options)
        loss = balance + z_loss(logits_TE, token_mask=mask_T)
        loss.backward()
        assert loss == 0 and logits_TE.grad is not None and not logits_TE.grad.any()
    empty_TE = torch.zeros(0, 5, requires_grad=True)
    loss = z_loss(empty_TE) + load_balance_loss(empty_TE, torch.zeros(0, 2).int(), **options)
    loss.backward()
    assert loss == 0


def test_strides() -> None:
    """Transposed, sliced and expanded arguments give what contiguous ones give."""
    probs_TE, ids_TK = drawn(12, 6, 3)
    mask_T = torch.rand(24)[::2] < 0.5
    wide_ids = [ids_TK.t().contiguous().t(), torch.cat([ids_TK, ids_TK], 1)[:, 3:]]
    for scope, mask, ids in product(("batch", "sequence"), (None, mask_T), wide_ids):
        options: dict[str, Any] = {"num_experts": 6, "scope": scope, "sequence_length": 4}
        want = load_balance_loss(probs_TE, ids_TK, token_mask=mask, **options)
        probs = probs_TE.t().contiguous().t()
        got = load_balance_loss(probs, ids, token_mask=mask, **options)
        torch.testing.assert_close(got, want)
    same_TE = torch.rand(1, 4).expand(6, 4)
    torch.testing.assert_close(z_loss(same_TE), z_loss(same_TE.contiguous()))


def test_z_loss_against_a_loop() -> None:
    logits_TE = 5 * torch.randn(9, 7, dtype=torch.float64)
    mask_T = torch.rand(9) < 0.5
    squares = [math.log(sum(math.exp(z) for z in row)) ** 2 for row in logits_TE.tolist()]
    assert math.isclose(z_loss(logits_TE), sum(squares) / 9)
    kept = [s for s, keep in zip(squares, mask_T.tolist()) if keep]
    assert math.isclose(z_loss(logits_TE, token_mask=mask_T), sum(kept) / max(len(kept), 1))
    assert z_loss(torch.full((2, 3), 200.0)).isfinite()
    half_TE = logits_TE.to(torch.bfloat16)
    assert z_loss(half_TE).dtype == torch.float32
    torch.testing.assert_close(z_loss(half_TE), z_loss(half_TE.float()))


def test_gradcheck() -> None:
    logits_TE = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    ids_TK, mask_T = torch.randint(-1, 5, (6, 2)), torch.tensor([True, True, False] * 2)
    options: dict[str, Any] = {"num_experts": 4, "token_mask": mask_T, "sequence_length": 3}
    for scope in ("batch", "sequence", "global"):

        def loss(z: Tensor, scope: Any = scope) -> Tensor:
            return load_balance_loss(z.softmax(1), ids_TK, scope=scope, **options)

        assert torch.autograd.gradcheck(loss, logits_TE)
    assert torch.autograd.gradcheck(z_loss, logits_TE)
    assert torch.autograd.gradcheck(lambda z: z_loss(z, token_mask=mask_T), logits_TE)


@pytest.mark.parametrize("scope", ["batch", "sequence"])
def test_compile_does_not_depend_on_the_number_of_tokens(scope: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # slow, and no worker needs it

    def loss(z_TE: Tensor, ids_TK: Tensor, mask_T: Tensor) -> Tensor:
        options: dict[str, Any] = {"num_experts": 5, "scope": scope, "sequence_length": 4}
        balance = load_balance_loss(z_TE.softmax(1), ids_TK, token_mask=mask_T, **options)
        return balance + z_loss(z_TE, token_mask=mask_T)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for tokens in (8, 12, 20):
        z_TE = torch.randn(tokens, 5, requires_grad=True)
        ids_TK, mask_T = torch.randint(0, 5, (tokens, 2)), torch.rand(tokens) < 0.7
        for value in (z_TE, ids_TK, mask_T):
            torch._dynamo.mark_dynamic(value, 0)
        got, want = compiled(z_TE, ids_TK, mask_T), loss(z_TE, ids_TK, mask_T)
        torch.testing.assert_close(got, want)
        grads = [torch.autograd.grad(value, z_TE)[0] for value in (got, want)]
        torch.testing.assert_close(*grads)
    assert counter.frame_count == 1


def test_selection_bias_moves_by_the_sign() -> None:
    counts_E = torch.tensor([0, 3, 4, 5, 8])  # the mean is 4, and one count equals it
    for dtype in (torch.int32, torch.int64, torch.uint8):
        bias_E = torch.tensor([0.5, 0.0, 0.0, 0.0, -0.5])
        assert update_selection_bias(bias_E, counts_E.to(dtype)) is None
        torch.testing.assert_close(bias_E, torch.tensor([0.501, 1e-3, 0, -1e-3, -0.501]))
    update_selection_bias(bias_E, counts_E, rate=0.25)
    torch.testing.assert_close(bias_E, torch.tensor([0.751, 0.251, 0, -0.251, -0.751]))


def test_selection_bias_compares_exactly() -> None:
    """Counts that fp32 cannot tell from their mean, and a mean that is no integer."""
    large = 2**30
    for counts, signs in (([large, large + 1, large - 1], [0, -1, 1]), ([0, 0, 1], [1, 1, -1])):
        results = []
        for _ in range(3):
            bias_E = torch.zeros(3)
            update_selection_bias(bias_E, torch.tensor(counts, dtype=torch.int32), rate=1.0)
            results.append(bias_E.tolist())
        assert results == [signs] * 3
    parameter = torch.nn.Parameter(torch.zeros(3))
    update_selection_bias(parameter, torch.tensor([1, 2, 3]))
    assert parameter.grad is None and parameter.is_leaf


def worker(rank: int, init: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
    torch.manual_seed(rank)
    tokens = 5 if rank == 0 else 0  # a rank without tokens takes part all the same
    out: dict[str, Any] = {}
    for name, count in (("uneven", 5 + rank), ("empty", tokens)):
        probs_TE = torch.rand(count, 4, dtype=torch.float64, requires_grad=True)
        ids_TK = torch.randint(0, 4, (count, 2))
        loss = load_balance_loss(probs_TE, ids_TK, num_experts=4, scope="global")
        loss.backward()
        out[name] = (probs_TE.detach(), ids_TK, loss.detach(), probs_TE.grad)
    counts_E, bias_E = torch.tensor([[1, 0, 2], [1, 3, 0]])[rank], torch.zeros(3)
    update_selection_bias(bias_E, counts_E, rate=1.0, reduce=True)
    out["bias"] = (counts_E, bias_E)
    torch.save(out, f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_global_scope_and_bias_over_two_ranks(tmp_path: Path) -> None:
    mp.spawn(worker, (f"file://{tmp_path}/init", str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in ("uneven", "empty"):
        chosen = [e for rank in ranks for e in rank[name][1].flatten().tolist()]
        f_E = torch.tensor([chosen.count(e) / len(chosen) for e in range(4)], dtype=torch.float64)
        for rank in ranks:
            probs_TE, _, loss, d_probs_TE = rank[name]
            tokens = max(probs_TE.shape[0], 1)
            torch.testing.assert_close(loss, 4 * (f_E * probs_TE.sum(0) / tokens).sum())
            torch.testing.assert_close(d_probs_TE, (4 * f_E / tokens).expand_as(probs_TE))
    for counts_E, bias_E in (rank["bias"] for rank in ranks):
        assert bias_E.tolist() == [1, -1, 1]
        assert counts_E.sum() in (3, 4)  # the caller's counts are left alone


PROBS_TE, IDS_TK = torch.rand(6, 4), torch.zeros(6, 2, dtype=torch.int64)
BAD: list[tuple[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]]] = [
    (load_balance_loss, "router_probs", (PROBS_TE, IDS_TK), {"num_experts": 5}),
    (load_balance_loss, "router_probs", (IDS_TK, IDS_TK), {"num_experts": 2}),
    (load_balance_loss, "num_experts", (PROBS_TE[:, :0], IDS_TK), {"num_experts": 0}),
    (load_balance_loss, "topk_indices", (PROBS_TE, PROBS_TE), {"num_experts": 4}),
    (load_balance_loss, "topk_indices", (PROBS_TE, IDS_TK[:5]), {"num_experts": 4}),
    (load_balance_loss, "scope", (PROBS_TE, IDS_TK), {"num_experts": 4, "scope": "token"}),
    (load_balance_loss, "token_mask", (PROBS_TE, IDS_TK),
     {"num_experts": 4, "token_mask": torch.ones(6)}),
    (load_balance_loss, "sequence_length", (PROBS_TE, IDS_TK),
     {"num_experts": 4, "scope": "sequence"}),
    (load_balance_loss, "sequence_length", (PROBS_TE, IDS_TK),
     {"num_experts": 4, "scope": "sequence", "sequence_length": 0}),
    (load_balance_loss, "T", (PROBS_TE, IDS_TK),
     {"num_experts": 4, "scope": "sequence", "sequence_length": 4}),
    (load_balance_loss, "router_probs", (PROBS_TE[0], IDS_TK), {"num_experts": 4}),
    (load_balance_loss, "router_probs", (None, IDS_TK), {"num_experts": 4}),
    (z_loss, "router_logits", (PROBS_TE[0],), {}),
    (z_loss, "token_mask", (PROBS_TE,), {"token_mask": torch.ones(5, dtype=torch.bool)}),
    (update_selection_bias, "selection_bias", (PROBS_TE, IDS_TK[:4, 0]), {}),
    (update_selection_bias, "tokens_per_expert", (PROBS_TE[0], PROBS_TE[0]), {}),
    (update_selection_bias, "tokens_per_expert", (PROBS_TE[0], IDS_TK[:, 0]), {}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "argument", "args", "options"), BAD)
def test_bad_argument(
    function: Callable[..., Any], argument: str, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    where = re.escape(f"tokenyard.{function.__name__}: `{argument}`")
    with pytest.raises(ArgumentError, match=where):
        function(*args, **options)


def test_a_group_without_effect_is_refused() -> None:
    group: Any = object()
    bias, counts = torch.zeros(2), torch.tensor([1, 2])
    with pytest.raises(ArgumentError, match="`group`: expected None, unless `reduce` is true"):
        update_selection_bias(bias, counts, group=group)
    probs, ids = torch.rand(3, 2), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="`group`: expected None, unless the scope is 'global'"):
        load_balance_loss(probs, ids, num_experts=2, group=group)


def test_a_mask_on_another_device() -> None:
    mask = torch.ones(3, dtype=torch.bool, device="meta")
    probs, ids = torch.rand(3, 2), torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="z_loss: `token_mask`: expected device cpu"):
        z_loss(probs, token_mask=mask)
    with pytest.raises(ArgumentError, match="balance_loss: `token_mask`: expected device cpu"):
        load_balance_loss(probs, ids, num_experts=2, token_mask=mask)


def test_no_choices() -> None:
    with pytest.raises(ArgumentError, match=r"`topk_indices.shape\[1\]`: expected at least 1"):
        load_balance_loss(torch.rand(3, 2), torch.zeros(3, 0, dtype=torch.int64), num_experts=2)
