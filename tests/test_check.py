"""Argument checks: the sentence of an error, and what each check lets pass."""

import pytest
import torch

from tokenyard import ArgumentError, check

CPU = torch.device("cpu")


def test_an_error_is_a_value_error_with_four_parts() -> None:
    with pytest.raises(ValueError) as caught:
        check.fail("permute", "x", "a tensor", "nothing")
    assert isinstance(caught.value, ArgumentError)
    assert str(caught.value) == "tokenyard.permute: `x`: expected a tensor, got nothing"


def test_describe() -> None:
    assert check.describe(torch.zeros(2, 3)) == "torch.float32 [2, 3] on cpu"
    assert check.describe("a") == "str 'a'"
    assert check.describe(None) == "NoneType None"


@pytest.mark.parametrize(
    "value, shape, options, message",
    [
        ([1.0], None, {}, "expected a tensor, got list [1.0]"),
        (torch.zeros(2), ["T", "K"], {}, "expected shape [T, K], got torch.float32 [2] on cpu"),
        (torch.zeros(2, 3), ["T", 4], {}, "expected shape [T, 4], got torch.float32 [2, 3] on cpu"),
        (
            torch.zeros(2),
            ["T"],
            {"dtypes": check.INTEGER_DTYPES},
            "expected dtype in {int16, int32, int64, int8, uint8}, got torch.float32 [2] on cpu",
        ),
        (
            torch.zeros(2, device="meta"),
            ["T"],
            {"device": CPU},
            "expected device cpu, that of the other arguments, got torch.float32 [2] on meta",
        ),
    ],
)
def test_tensor_refuses(value: object, shape: object, options: dict, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check.tensor("op", "arg", value, shape, **options)  # type: ignore[arg-type]
    assert str(caught.value) == f"tokenyard.op: `arg`: {message}"


def test_tensor_accepts() -> None:
    check.tensor("op", "arg", torch.zeros(()), [])
    check.tensor("op", "arg", torch.zeros(2, 3), ["T", 3], dtypes=check.FLOAT_DTYPES, device=CPU)
    check.tensor("op", "arg", torch.nn.Parameter(torch.zeros(0, 3)), [0, "H"])
    check.tensor("op", "arg", torch.zeros(2, 3, device="meta"))


def test_dtype_sets() -> None:
    assert torch.bool not in check.INTEGER_DTYPES and torch.uint8 in check.INTEGER_DTYPES
    assert torch.float8_e4m3fn not in check.FLOAT_DTYPES and torch.float64 in check.FLOAT_DTYPES


def test_numbers_and_choices() -> None:
    check.at_least("op", "n", 1, 1)
    check.multiple_of("op", "n", 0, 4, "alignment")
    check.fits_int32("op", "n", 2**31 - 1, "T*K")
    check.choice("op", "c", "a", ("a", "b"))
    check.same_dtype("op", "w", torch.zeros(1), "x", torch.float32)
    for function, arguments, message in [
        (check.at_least, (0, 1), "expected at least 1, got 0"),
        (check.multiple_of, (6, 4, "alignment"), "expected a multiple of 4 (alignment), got 6"),
        (check.fits_int32, (2**31, "T*K"), "expected T*K below 2^31, got 2147483648"),
        (check.choice, ("c", ("a", "b")), "expected one of 'a', 'b', got 'c'"),
        (
            check.same_dtype,
            (torch.zeros(1), "x", torch.float16),
            "expected torch.float16, the dtype of `x`, got torch.float32 [1] on cpu",
        ),
    ]:
        with pytest.raises(ArgumentError) as caught:
            function("op", "arg", *arguments)
        assert str(caught.value) == f"tokenyard.op: `arg`: {message}"


def test_no_check_reads_values() -> None:
    """They work on tensors that hold no data."""
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(2, 3)
        check.tensor("op", "arg", fake, [2, "H"], dtypes=check.FLOAT_DTYPES, device=CPU)
        check.same_dtype("op", "arg", fake, "x", torch.float32)
