"""A template as the runtime sees it: a callable, the source of each input, the destination of each gradient."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacompile.codegen import HAS_TRITON
from megacompile.codegen.scaled_products import add_scaled_product
from megacompile.compat.core import grouped_mm
from megacompile.runtime.memory.arena import Accumulators, Weights


@dataclass(frozen=True)
class Activation:
    """The result of a compute op: outputs (in a backward, the gradients of its carried inputs), residuals, a loss. Residuals
    may be cleared before outputs. `experts`: the numbers of those that a router has chosen, in order."""

    outputs: tuple[Tensor, ...]
    residuals: list[Any] = field(default_factory=list)
    loss: Tensor | None = None
    experts: Sequence[int] = ()


@dataclass(frozen=True)
class Input:
    """Source of one positional input. `kind` "parameter": `position` in tile number `tile` of the call; "constant": a
    buffer; "batch", "size" (dimension `position`), "carried" and "shared" (output `position`), "loss_denominator", "share"
    (of a micro-batch in the batch's rows), "total" (number `position`), "random" (of call number `position`)."""

    kind: str
    name: str = ""
    tile: int = 0
    position: int = 0


@dataclass(frozen=True)
class ParameterGradient:
    """results[i] or, with two results, the product results[i] @ results[j], or, with three, a grouped one, or, with four, a
    scaled one by `kernel` -> a parameter's accumulator."""

    results: tuple[int, ...]
    tile: int  # number among the call's *trainable* tiles
    position: int
    kernel: str = ""


@dataclass(frozen=True)
class Kernel:
    """One variant of a template, compiled for one shape and bound to one call."""

    run: Callable[..., Any]
    inputs: tuple[Input, ...]
    outputs: int
    residuals: int = 0
    tangents: int = 0
    parameter_gradients: tuple[ParameterGradient, ...] = ()
    carried_gradients: tuple[int, ...] = ()  # results, in the order of the carried inputs


@dataclass
class Batch:
    """The batch on the device, by micro-batch, and everything else that a section gets from its caller."""

    micro_batches: Sequence[Mapping[str, Tensor]]
    constants: Mapping[str, Tensor]
    loss_denominator: Tensor | None = None
    target_tokens: Sequence[int] = ()  # by micro-batch, if the host knows them
    shares: Tensor | None = None  # by micro-batch
    totals: Sequence[Tensor | None] = ()  # values made from all rows of the batch
    random: Tensor | None = None  # dropout seeds, by micro-batch and call
    scale: Tensor | None = None  # the gradient of the loss that the caller sent
    output_gradients: Sequence[tuple[Tensor, ...]] = ()  # or of the outputs, by micro-batch
    results: dict[str, list[Activation]] = field(default_factory=dict)
    loss_known: Any = None  # the event after the losses in `results`
    #: By micro-batch: which positions are padding, bool [rows, length]. Empty if none is.
    padding: Sequence[Tensor] = ()
    #: By call and number of its mixture: where each expert's pairs end, added up over micro-batches, int32 [experts]. Pairs of
    #: padding are left out.
    ends_of_experts: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    useful_tokens: int = 0  # in the caller's batch, without padding
    computed_tokens: int = 0

    def release(self) -> None:
        """Drops all tensors."""
        self.micro_batches = self.totals = self.output_gradients = self.padding = ()
        self.constants, self.results = {}, {}
        self.loss_denominator = self.shares = self.random = self.scale = None


def bind(kernel: Kernel, batch: Batch, mb: int, weights: tuple[Weights, ...], inputs: tuple[Activation, ...]) -> list[Any]:
    """The positional arguments of a kernel. An input is None if its batch argument is absent (labels, for example)."""
    values: list[Any] = []
    for source in kernel.inputs:
        match source.kind:
            case "parameter":
                values.append(weights[source.tile].views[source.position] if weights else None)
            case "carried":
                values.append(inputs[0].outputs[source.position] if inputs else None)
            case "shared":
                values.append(inputs[1].outputs[source.position] if inputs else None)
            case "batch":
                values.append(batch.micro_batches[mb].get(source.name))
            case "size":
                values.append(batch.micro_batches[mb][source.name].shape[source.position])
            case "constant":
                values.append(batch.constants[source.name])
            case "loss_denominator":
                values.append(batch.loss_denominator)
            case "share":
                assert batch.shares is not None, "a batch without shares for a loss that is averaged"
                values.append(batch.shares[mb])
            case "total":
                values.append(batch.totals[source.position])
            case "random":
                assert batch.random is not None, "a batch without random numbers for a model that draws them"
                values.append(batch.random[mb, source.position])
            case kind:
                raise AssertionError(f"no such input: {kind}")
    return values


def accumulate(kernel: Kernel, results: tuple[Any, ...], accumulators: tuple[Accumulators, ...]) -> None:
    """Adds a backward's parameter gradients to the FP32 accumulators. Matrices are added inside their GEMM."""
    for gradient in kernel.parameter_gradients:
        into = accumulators[gradient.tile].views[gradient.position]
        match [results[i] for i in gradient.results]:
            case [value]:
                _add(into, value)
            case [a, b]:
                _add_product(into, a, b)
            case [rows, others, ends]:  # no grouped GEMM adds to what is there, or gives FP32
                _add(into, grouped_product(rows, others, ends))
            case [a, b, scale_a, scale_b]:
                add_scaled_product(into, a, b, scale_a, scale_b, gradient.kernel)


def _add(into: Tensor, value: Tensor) -> None:
    if into.dtype != value.dtype and into.is_cuda and HAS_TRITON and into.is_contiguous() and value.is_contiguous():
        from megacompile.codegen import triton_kernels

        triton_kernels.add(into, value)  # PyTorch's kernel for two dtypes takes 1.4 times as long
    else:
        into.add_(value)


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32:
        torch.addmm(into, a, b, out=into)
    elif into.device.type == "cuda":
        torch.addmm(into, a, b, out_dtype=torch.float32, out=into)
    else:  # no CPU GEMM takes low-precision operands to FP32: the product is rounded once before it is added
        into.add_(a @ b)


def grouped_product(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """[groups, K, N]: for each group, transpose(rows of the group, [.., K]) @ (others of the group, [.., N]). `ends`: int32
    [groups], where each group of rows ends."""
    # Row-major operands: in others a group's first element may have an address that kernels do not accept.
    product: Tensor = grouped_mm(rows.contiguous().t(), others.contiguous(), offs=ends)
    return product
