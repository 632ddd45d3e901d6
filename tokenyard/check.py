"""Argument checks: every error names the operator, the argument, what was expected and what was got.

They run once, at the public boundary, before any kernel; none reads a tensor's values.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

INTEGER_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
FLOAT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INT32_MAX = 2**31 - 1


class ArgumentError(ValueError):
    """A bad argument, found before any kernel ran."""


def fail(operator: str, argument: str, expected: str, got: object) -> NoReturn:
    raise ArgumentError(f"tokenyard.{operator}: `{argument}`: expected {expected}, got {got}")


def describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return f"{type(value).__name__} {value!r}"


def tensor(
    operator: str,
    argument: str,
    value: object,
    shape: Sequence[int | str] | None = None,
    *,
    dtypes: frozenset[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """`shape` gives each dimension as a number that must hold or a letter that names it."""
    if not isinstance(value, Tensor):
        fail(operator, argument, "a tensor", describe(value))
    if shape is not None and not has_shape(value, shape):
        fail(operator, argument, f"shape {shape_text(shape)}", describe(value))
    if dtypes is not None and value.dtype not in dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        fail(operator, argument, f"dtype in {{{names}}}", describe(value))
    if device is not None and value.device != device:
        fail(operator, argument, f"device {device}, that of the other arguments", describe(value))


def has_shape(value: Tensor, shape: Sequence[int | str]) -> bool:
    fits = value.dim() == len(shape)
    for got, want in zip(value.shape, shape):
        fits = fits and (isinstance(want, str) or got == want)
    return fits


def shape_text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def same_dtype(operator: str, argument: str, value: Tensor, other: str, dtype: torch.dtype) -> None:
    if value.dtype != dtype:
        fail(operator, argument, f"{dtype}, the dtype of `{other}`", describe(value))


def choice(operator: str, argument: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        fail(operator, argument, "one of " + ", ".join(repr(a) for a in allowed), repr(value))


def at_least(operator: str, argument: str, value: int, minimum: int) -> None:
    if not isinstance(value, int | torch.SymInt):
        fail(operator, argument, "an integer", describe(value))
    if value < minimum:
        fail(operator, argument, f"at least {minimum}", value)


def number(operator: str, argument: str, value: object) -> None:
    if not isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        fail(operator, argument, "a number", describe(value))


def multiple_of(operator: str, argument: str, value: int, factor: int, what: str) -> None:
    if value % factor != 0:
        fail(operator, argument, f"a multiple of {factor} ({what})", value)


def fits_int32(operator: str, argument: str, value: int, what: str) -> None:
    if value > INT32_MAX:
        fail(operator, argument, f"{what} below 2^31", value)
