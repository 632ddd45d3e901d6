"""How an operator is registered: one implementation, reached in two ways.

Eager calls go through a `torch.autograd.Function` (about 20 us of host time), compiled and exported ones,
and tensor subclasses such as fake tensors, through the custom op `tokenyard::<name>`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


class Operator:
    """A forward of tensors and plain values, with an optional backward, callable with grad.

    forward(*args)                      the implementation, typed so that a schema can be read off it
    fake(*args)                         shapes and dtypes of what it returns
    save(ctx, inputs, output)           keeps what the gradient needs
    gradient(ctx, backward, *grads)     one gradient per input, from `backward` and what was saved
    backward, backward_fake             as forward and fake, registered as `tokenyard::<name>_backward`
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        save: Callable[..., None] | None = None,
        gradient: Callable[..., Any] | None = None,
        backward: Callable[..., Any] | None = None,
        backward_fake: Callable[..., Any] | None = None,
    ) -> None:
        self.forward = forward
        self.registered = torch.library.custom_op(f"tokenyard::{name}", forward, mutates_args=())
        self.registered.register_fake(fake)
        self.function: type[torch.autograd.Function] | None = None
        if gradient is None or save is None or backward is None or backward_fake is None:
            return
        registered_backward = torch.library.custom_op(
            f"tokenyard::{name}_backward", backward, mutates_args=()
        )
        registered_backward.register_fake(backward_fake)
        self.registered.register_autograd(
            lambda ctx, *grads: gradient(ctx, registered_backward, *grads), setup_context=save
        )
        self.function = type(
            name,
            (torch.autograd.Function,),
            {
                "forward": staticmethod(forward),
                "setup_context": staticmethod(save),
                "backward": staticmethod(
                    once_differentiable(lambda ctx, *grads: gradient(ctx, backward, *grads))
                ),
            },
        )

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.registered(*args)
        needs_grad = False
        for arg in args:
            if isinstance(arg, Tensor):
                if type(arg) not in _PLAIN:
                    return self.registered(*args)
                needs_grad = needs_grad or arg.requires_grad
        if needs_grad and self.function is not None and torch.is_grad_enabled():
            return self.function.apply(*args)
        return self.forward(*args)
