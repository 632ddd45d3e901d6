"""Scores of a router, their norms, and the order in which experts are chosen."""

import triton
import triton.language as tl

EXCLUDED = tl.constexpr(-2147483648)
"""The key of what may not be chosen: below that of -inf."""


@triton.jit
def cap(logits, softcap, CAPPED: tl.constexpr):
    """The logits z in fp32, finite or -inf."""
    z = logits.to(tl.float32)
    z = tl.where(z == z, z, float("-inf"))
    z = tl.minimum(z, 3.4028234663852886e38)
    if CAPPED:
        z = tl.where(z == float("-inf"), z, softcap * tanh(z / softcap))
    return z


@triton.jit
def through_cap(d_z, z, logits, softcap, CAPPED: tl.constexpr):
    """The gradient of the logits from that of z; zero where a logit was not finite."""
    if CAPPED:
        d_z = d_z * (1.0 - (z / softcap) * (z / softcap))
    return tl.where(tl.abs(logits.to(tl.float32)) < float("inf"), d_z, 0.0)


@triton.jit
def tanh(y):
    """1 - 2 / (exp(2y) + 1), with y bounded so that exp stays finite; its series where that cancels."""
    y = tl.minimum(tl.maximum(y, -40.0), 40.0)
    q = y * y
    series = 1.0 + q * (-1.0 / 3 + q * (2.0 / 15 + q * (-17.0 / 315 + q * (62.0 / 2835))))
    return tl.where(q < 0.04, y * series, 1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))


@triton.jit
def softplus(z):
    """max(z, 0) + log(1 + e), e = exp(-|z|); the logarithm corrected for the rounding of 1 + e."""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    log = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(z, 0.0) + log


@triton.jit
def score(z, largest, total, SCORE: tl.constexpr):
    """The score of logits; `largest` and `total` are those of the softmax."""
    if SCORE == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-z))
    elif SCORE == "sqrtsoftplus":
        s = tl.sqrt(softplus(z))
    elif SCORE == "identity":
        s = z
    else:
        s = tl.where(z == float("-inf"), 0.0, tl.exp(z - largest) / total)
    return s


@triton.jit
def sum_of_exp(z, AXIS: tl.constexpr):
    """(max, sum of exp(z - max)) along AXIS; (0, 1) where every logit is -inf."""
    largest = tl.max(z, AXIS)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(z - tl.expand_dims(largest, AXIS)), AXIS)
    return largest, tl.where(total == 0, 1.0, total)


@triton.jit
def ordered(value):
    """int32 that order as the floats do; -inf lies above EXCLUDED."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, so that they tie
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def highest_id(keys, ids):
    """Along axis 1: the id of the highest key, the lowest of equal ones."""
    best = tl.max(keys, 1)
    return tl.min(tl.where(keys == tl.expand_dims(best, 1), ids, 2147483647), 1)


@triton.jit
def quarters(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS,COLUMNS] -> four [ROWS,COLUMNS/4], of columns 4i, 4i + 1, ...: neighbours in a thread."""
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def in_order(key, other_key, item, other_item):
    """Swap neighbours where the second key is higher; equal keys stay as they are."""
    swap = other_key > key
    first, second = tl.where(swap, other_key, key), tl.where(swap, key, other_key)
    return first, second, tl.where(swap, other_item, item), tl.where(swap, item, other_item)


@triton.jit
def sort_quarters(k0, k1, k2, k3, i0, i1, i2, i3):
    """Four keys with their ids, descending; stable."""
    k0, k1, i0, i1 = in_order(k0, k1, i0, i1)
    k1, k2, i1, i2 = in_order(k1, k2, i1, i2)
    k2, k3, i2, i3 = in_order(k2, k3, i2, i3)
    k0, k1, i0, i1 = in_order(k0, k1, i0, i1)
    k1, k2, i1, i2 = in_order(k1, k2, i1, i2)
    k0, k1, i0, i1 = in_order(k0, k1, i0, i1)
    return k0, k1, k2, k3, i0, i1, i2, i3


@triton.jit
def power(x, p):
    """x^p of x >= 0, with 0^0 = 1 and 0^p = 0."""
    return tl.where(
        x > 0, tl.exp2(p * tl.log2(tl.where(x > 0, x, 1.0))), tl.where(p == 0, 1.0, 0.0)
    )


@triton.jit
def norm_of(s, norm_p, eps, NORMALIZE: tl.constexpr, CLAMP: tl.constexpr):
    """[TOKENS] what the scores are divided by; 1 where that would be 0."""
    if NORMALIZE == "sum":
        norm = tl.sum(s, 1)
    else:
        # scaled by the largest, so that powers stay in range
        largest = tl.max(tl.abs(s), 1)
        largest = tl.where(largest == 0, 1.0, largest)
        power_sum = tl.sum(power(tl.abs(s) / largest[:, None], norm_p), 1)
        norm = tl.where(tl.max(tl.abs(s), 1) == 0, 0.0, largest * power(power_sum, 1.0 / norm_p))
    if CLAMP:
        norm = tl.maximum(norm, eps)
    else:
        norm = norm + eps
    return tl.where(norm == 0, 1.0, norm)


@triton.jit
def members_of_best_groups(
    keys,
    choice,
    TOPK_GROUPS: tl.constexpr,
    SUM_OF_TOP2: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """The keys, EXCLUDED outside the groups that stay; ties go to the lowest group."""
    grouped = tl.reshape(choice, (TOKENS, GROUPS, MEMBERS))
    score = tl.max(grouped, 2)
    if SUM_OF_TOP2 and GROUP_SIZE > 1:
        member = tl.arange(0, MEMBERS)[None, None, :]
        first = tl.min(tl.where(grouped == score[:, :, None], member, MEMBERS), 2)
        rest = tl.where(member == first[:, :, None], float("-inf"), grouped)
        score += tl.max(rest, 2)
    group = tl.arange(0, GROUPS)[None, :]
    group_keys = tl.where(group < NUM_GROUPS, ordered(score), EXCLUDED)
    kept = group < 0
    for _ in tl.static_range(TOPK_GROUPS):
        found = highest_id(group_keys, group)
        kept = kept | (group == found[:, None])
        group_keys = tl.where(group == found[:, None], EXCLUDED, group_keys)
    kept = tl.broadcast_to(kept[:, :, None], (TOKENS, GROUPS, MEMBERS))
    return tl.where(tl.reshape(kept, (TOKENS, GROUPS * MEMBERS)), keys, EXCLUDED)
