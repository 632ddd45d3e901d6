"""The kernels of topk in the interpreter: choices equal to the definition, weights and gradients close."""

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import launched
from torch import Tensor

import tokenyard

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)

INF, NAN = float("inf"), float("nan")
SCORES = ("softmax", "softmax_of_selected", "sigmoid", "sqrtsoftplus", "identity")
NORMS: list[dict[str, Any]] = [
    {},
    {"normalize": "sum"},
    {"normalize": "sum", "eps": 1e-20},
    {"normalize": "sum", "eps": 2.0, "eps_mode": "clamp"},
    {"normalize": "norm", "norm_p": 2.0, "eps": 0.5, "eps_mode": "clamp"},
    {"normalize": "norm", "norm_p": 1.0},
    {"normalize": "norm", "norm_p": 1.5, "eps": 0.5},
    {"normalize": "norm", "norm_p": 4.0, "eps": 1e-6},
]


def check(logits_TE: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Compare with the definition: ids exactly; weights, and gradients of random ones, closely."""
    grad_TK = torch.randn(logits_TE.shape[0], top_k)

    def both() -> tuple[Tensor, Tensor, Tensor]:
        leaf_TE = logits_TE.detach().requires_grad_()
        weights_TK, ids_TK = tokenyard.topk(leaf_TE, top_k, **options)
        grad = grad_TK.to(weights_TK.dtype)
        return weights_TK.detach(), ids_TK, torch.autograd.grad(weights_TK, leaf_TE, grad)[0]

    (weights_TK, ids_TK, d_logits_TE), names = launched(both)
    assert names == ["_topk_kernel", "_topk_backward_kernel"] * (logits_TE.shape[0] > 0)
    want_TK, want_ids_TK, want_TE = both()
    assert ids_TK.dtype == torch.int32
    assert torch.equal(ids_TK, want_ids_TK)
    torch.testing.assert_close(weights_TK, want_TK, rtol=2e-5, atol=1e-6)
    close = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}.get(logits_TE.dtype, 1e-4)
    torch.testing.assert_close(d_logits_TE, want_TE, rtol=close, atol=close / 10)
    return weights_TK, ids_TK


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_scores_and_norms(score: str, norm: dict[str, Any], poisoned_memory: None) -> None:
    logits_TE = torch.randn(9, 6)
    if norm.get("normalize") == "sum" and score == "identity":
        logits_TE = logits_TE.abs() + 0.5  # a sum that is not near zero
    check(logits_TE, 3, score=score, scale=2.5, **norm)
    check(logits_TE, 3, score=score, softcap=2.0, **norm)


@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(1, 1), (2, 1), (3, 3), (6, 6), (60, 4), (60, 22), (72, 1), (160, 6), (384, 8), (64, 40)],
)
def test_shapes_of_models(num_experts: int, top_k: int, poisoned_memory: None) -> None:
    logits_TE = torch.randn(5, num_experts)
    for score in ("softmax", "sigmoid"):
        check(logits_TE, top_k, score=score, normalize="sum", eps=1e-20)
    bias_E = torch.randn(num_experts)
    check(logits_TE, top_k, score="sigmoid", selection_bias=bias_E)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 127, 128, 129])
def test_tokens_at_a_block_boundary(num_tokens: int, poisoned_memory: None) -> None:
    """128 tokens a program with 6 experts, 16 with 60."""
    check(torch.randn(num_tokens, 6), 2, normalize="sum")
    check(torch.randn(num_tokens, 60), 4, score="sigmoid")


@pytest.mark.parametrize("score", SCORES)
def test_ties_go_to_the_lowest_id(score: str) -> None:
    logits_TE = torch.randint(0, 3, (40, 12)).float()
    logits_TE[3] = 0
    logits_TE[4, :6], logits_TE[4, 6:] = -0.0, 0.0
    logits_TE[5] = torch.arange(12) % 2
    _, ids_TK = check(logits_TE, 5, score=score)
    assert ids_TK[3].tolist() == ids_TK[4].tolist() == [0, 1, 2, 3, 4]
    assert ids_TK[5].tolist() == [1, 3, 5, 7, 9]
    check(logits_TE, 12, score=score)


def test_ties_of_saturated_scores() -> None:
    """Sigmoid is 1 for all of these; without a bias the logits decide, with one the ids do."""
    logits_TE = torch.tensor([[100.0, 300, 200, -200], [50, 40, 60, 70]])
    _, ids_TK = check(logits_TE, 2, score="sigmoid")
    assert ids_TK.tolist() == [[1, 2], [3, 2]]
    _, ids_TK = check(logits_TE, 2, score="sigmoid", selection_bias=torch.zeros(4))
    assert ids_TK.tolist() == [[0, 1], [0, 1]]


def test_neighbouring_logits_are_told_apart() -> None:
    """Every bit of an fp32 logit counts."""
    one = torch.tensor(1.0)
    above = torch.nextafter(one, torch.tensor(2.0))
    logits_TE = one.repeat(4, 200)
    logits_TE[1, 199] = logits_TE[2, 77] = above
    logits_TE[3] = -logits_TE[1]
    _, ids_TK = check(logits_TE, 2)
    assert ids_TK.tolist() == [[0, 1], [199, 0], [77, 0], [0, 1]]
    tiny = torch.tensor([[0.0, 1e-45, -1e-45, 3e-45]])
    assert check(tiny, 4)[1].tolist() == [[3, 1, 0, 2]]


@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "topk_groups": 2}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", ["softmax", "softmax_of_selected", "sigmoid", "sqrtsoftplus"])
def test_not_finite(score: str, biased: bool, groups: dict[str, int]) -> None:
    """NaN counts as -inf, +inf as the greatest number; K distinct experts whatever happens."""
    logits_TE = torch.randn(10, 12)
    logits_TE[1, 4] = NAN
    logits_TE[2] = NAN
    logits_TE[3] = -INF
    logits_TE[4, 2:] = -INF
    logits_TE[5, 1:] = NAN
    logits_TE[6, ::2], logits_TE[6, 1::2] = -INF, NAN
    options: dict[str, Any] = {"score": score, **groups}
    if biased:
        options["selection_bias"] = torch.randn(12)
    for norm in ({}, {"normalize": "sum", "eps": 1e-20}):
        weights_TK, ids_TK = check(logits_TE, 5, **options, **norm)
        assert all(len(set(ids)) == 5 for ids in ids_TK.tolist())
        assert not weights_TK.isnan().any()
    if not biased and not groups:
        assert ids_TK[2].tolist() == ids_TK[3].tolist() == [0, 1, 2, 3, 4]
    logits_TE[7, 0], logits_TE[8, 3:6] = INF, INF
    with tokenyard.use("reference"):
        _, want_TK = tokenyard.topk(logits_TE, 5, **options)
    _, ids_TK = launched(lambda: tokenyard.topk(logits_TE, 5, **options))[0]
    assert torch.equal(ids_TK, want_TK)


def test_a_bias_that_is_not_finite() -> None:
    bias_E = torch.tensor([0.0, NAN, -INF, INF, 1.0, -1.0])
    check(torch.randn(9, 6), 4, score="sigmoid", selection_bias=bias_E)
    check(torch.randn(9, 6), 6, score="softmax", selection_bias=bias_E)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_bias_much_larger_than_the_score(score: str) -> None:
    """It decides alone, and no weight shows it: weights come from the scores."""
    bias_E = torch.tensor([1e6, -1e6, 3e6, 2e6, -3e6])
    _, ids_TK = check(torch.randn(9, 5), 3, score=score, selection_bias=bias_E, normalize="sum")
    assert ids_TK.tolist() == [[2, 3, 0]] * 9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_of_the_bias(dtype: torch.dtype) -> None:
    bias_E = torch.randn(8).to(dtype)
    check(torch.randn(9, 8), 3, score="sigmoid", selection_bias=bias_E)
    strided_E = torch.stack([bias_E, bias_E * 99], 1)[:, 0]
    check(torch.randn(9, 8), 3, score="sigmoid", selection_bias=strided_E)


@pytest.mark.parametrize("group_score", ["max", "sum_of_top2"])
@pytest.mark.parametrize(
    ("num_experts", "num_groups", "topk_groups", "top_k"),
    [(12, 4, 2, 3), (12, 4, 4, 12), (60, 3, 2, 22), (9, 3, 1, 3), (8, 8, 3, 3), (160, 8, 3, 6)],
)
def test_groups(
    num_experts: int, num_groups: int, topk_groups: int, top_k: int, group_score: str
) -> None:
    groups = {"num_groups": num_groups, "topk_groups": topk_groups, "group_score": group_score}
    logits_TE = torch.randn(7, num_experts)
    logits_TE[1] = 0
    logits_TE[2] = torch.randint(0, 2, (num_experts,)).float()
    for score in ("softmax", "sigmoid"):
        check(logits_TE, top_k, score=score, **groups)
        bias_E = torch.randint(-8, 9, (num_experts,)) / 8
        check(logits_TE, top_k, score=score, selection_bias=bias_E, **groups)
        check(logits_TE, top_k, score=score, selection_bias=-100 - bias_E, **groups)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_given_choices(dtype: torch.dtype, score: str, poisoned_memory: None) -> None:
    """-1, E and any other id that names no expert weigh nothing and have no gradient."""
    ids_TK = torch.randint(-1, 7, (11, 3)).to(dtype)
    ids_TK[1], ids_TK[2], ids_TK[3] = -1, 6, 99
    ids_TK[4, 0], ids_TK[4, 1] = -128, 100
    logits_TE = torch.randn(11, 6).abs() + 0.5
    for norm in ({}, {"normalize": "sum", "eps": 1e-20}, {"normalize": "norm", "norm_p": 2.0}):
        weights_TK, got_TK = check(logits_TE, 3, score=score, topk_indices=ids_TK, **norm)
        assert torch.equal(got_TK, ids_TK.int().masked_fill((ids_TK < 0) | (ids_TK >= 6), -1))
        assert not weights_TK[got_TK < 0].any()
    check(logits_TE, 3, score=score, topk_indices=ids_TK.T.contiguous().T)


def test_given_choices_of_a_small_dtype() -> None:
    """A lane without a choice must not read as expert 255."""
    ids_TK = torch.randint(0, 256, (5, 3)).to(torch.uint8)
    check(torch.randn(5, 300), 3, topk_indices=ids_TK, normalize="sum")


@pytest.mark.parametrize("score", SCORES)
def test_given_duplicates(score: str) -> None:
    """The gradient of an expert that is chosen twice is the sum of both."""
    ids_TK = torch.tensor([[2, 2, 1, 2], [0, 3, 0, 3], [1, 1, 1, 1], [-1, 2, 2, -1], [4, 0, 4, 0]])
    logits_TE = torch.randn(5, 5).abs() + 0.5
    for norm in NORMS:
        check(logits_TE, 4, score=score, topk_indices=ids_TK, **norm)


def test_given_ids_past_int32() -> None:
    ids_TK = torch.tensor([[2**32, 1], [2**32 + 1, -(2**32)], [2**40, 0]])
    assert check(torch.randn(3, 4), 2, topk_indices=ids_TK)[1].tolist() == [
        [-1, 1],
        [-1, -1],
        [-1, 0],
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_of_logits(dtype: torch.dtype) -> None:
    logits_TE = torch.randn(20, 24).to(dtype)  # with ties
    for score in SCORES:
        weights_TK, _ = check(logits_TE, 4, score=score)
        assert weights_TK.dtype == torch.float32


def test_the_definition_serves_fp64() -> None:
    logits_TE = torch.randn(5, 6, dtype=torch.float64)
    got, names = launched(lambda: tokenyard.topk(logits_TE, 2))
    assert names == [] and got[0].dtype == torch.float64


def test_strides(poisoned_memory: None) -> None:
    for logits_TE in (
        torch.randn(9, 40)[:, 7:19],
        torch.randn(9, 24)[:, ::2],
        torch.randn(12, 9).T,
        torch.randn(1, 12).expand(9, 12),
        torch.randn(9, 1).expand(9, 12),
        torch.randn(109)[1:].view(9, 12),
    ):
        check(logits_TE, 3, score="sigmoid")
        check(logits_TE, 3, normalize="sum")
    check(torch.randn(9, 4)[:, 2:3], 1, score="sigmoid")


@pytest.mark.parametrize("grad", ["expanded", "transposed", "fp16"])
def test_gradients_of_weights(grad: str) -> None:
    logits_TE = torch.randn(9, 6)
    grad_TK = torch.randn(3, 9).T if grad == "transposed" else torch.randn(1, 1).expand(9, 3)
    dtype = torch.float16 if grad == "fp16" else None

    def gradient() -> Tensor:
        leaf_TE = logits_TE.clone().requires_grad_()
        weights_TK, _ = tokenyard.topk(leaf_TE, 3, score="sigmoid", dtype=dtype)
        return torch.autograd.grad(weights_TK, leaf_TE, grad_TK.to(weights_TK.dtype))[0]

    got, names = launched(gradient)
    assert "_topk_backward_kernel" in names
    torch.testing.assert_close(got, gradient())


def test_learned_scale_and_logit_bias() -> None:
    logits_TE, scale_E, bias_E = torch.randn(9, 6), torch.randn(6), torch.randn(6)
    grad_TK = torch.randn(9, 3)

    def gradients() -> tuple[Tensor, ...]:
        leaves = [value.clone().requires_grad_() for value in (logits_TE, scale_E, bias_E)]
        weights_TK, _ = tokenyard.topk(leaves[0], 3, expert_scale=leaves[1], logit_bias=leaves[2])
        return torch.autograd.grad(weights_TK, leaves, grad_TK)

    got, names = launched(gradients)
    assert names == ["_topk_kernel", "_topk_backward_kernel"]
    for mine, other in zip(got, gradients()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_choice_by_the_logit() -> None:
    """The ids of one launch are given to another; a cap and groups count for the choice."""
    logits_TE, bias_E = torch.randn(9, 6), torch.randn(6)
    options: dict[str, Any] = {"score": "sigmoid", "selection_bias": bias_E, "choose_by": "logit"}
    options |= {"softcap": 0.7, "num_groups": 3, "topk_groups": 2, "normalize": "sum"}
    (weights_TK, ids_TK), names = launched(lambda: tokenyard.topk(logits_TE, 2, **options))
    assert names == ["_topk_kernel", "_topk_kernel"]
    want_TK, want_ids_TK = tokenyard.topk(logits_TE, 2, **options)
    assert torch.equal(ids_TK, want_ids_TK)
    torch.testing.assert_close(weights_TK, want_TK)


@pytest.mark.parametrize("score", ["softmax", "softmax_of_selected", "sigmoid", "sqrtsoftplus"])
def test_large_logits(score: str) -> None:
    """No exponential overflows, and no capped logit either."""
    logits_TE = torch.tensor([[1e30, -1e30, 3e38, 0.0], [90, -90, 100, -200], [1e-30, 20, 21, 22]])
    check(logits_TE, 2, score=score)
    check(logits_TE, 2, score=score, softcap=30.0)


def test_small_scores_keep_their_digits() -> None:
    """log(1 + exp(z)) of a very negative logit is exp(z), not 0."""
    logits_TE = torch.linspace(-40, 20, 60)[None]
    weights_TK, _ = check(logits_TE, 60, score="sqrtsoftplus")
    exact_TK = torch.nn.functional.softplus(logits_TE.double()).sqrt().flip(1)
    torch.testing.assert_close(weights_TK.double(), exact_TK, rtol=1e-5, atol=0)


def test_small_logits_keep_their_digits_under_a_cap() -> None:
    """tanh(y) is nearly y: no cancellation, and so no ties that the logits do not have."""
    logits_TE = torch.logspace(-6, 1, 64)[None].repeat(2, 1)
    logits_TE[1] *= -1
    weights_TK, _ = check(logits_TE, 64, score="identity", softcap=30.0)
    exact_TE = 30 * torch.tanh(logits_TE.double() / 30)
    exact_TK = exact_TE.sort(dim=1, descending=True).values
    torch.testing.assert_close(weights_TK.double(), exact_TK, rtol=1e-5, atol=0)


@settings(max_examples=40)
@given(st.data())
def test_drawn_options(data: st.DataObject) -> None:
    """Logits on a coarse grid, so that ties are many; exact scores, so that both sides see them."""
    group_size, num_groups = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    topk_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, topk_groups * group_size))
    num_experts = group_size * num_groups
    values = st.sampled_from([-INF, -1.0, -0.5, 0.0, 0.5, 1.0, NAN])
    row = st.lists(values, min_size=num_experts, max_size=num_experts)
    logits_TE = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    options: dict[str, Any] = {
        "score": "identity",
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "group_score": data.draw(st.sampled_from(["max", "sum_of_top2"])),
    }
    if data.draw(st.booleans()):
        options["selection_bias"] = torch.tensor(data.draw(row))
    _, ids_TK = launched(lambda: tokenyard.topk(logits_TE, top_k, **options))[0]
    _, want_TK = tokenyard.topk(logits_TE, top_k, **options)
    assert torch.equal(ids_TK, want_TK)
