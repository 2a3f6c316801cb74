"""Runs a captured model layer by layer on real tensors: what calls and gradients mean, without a schedule."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.frontend import Call, CapturedModel, Variant
from megacompile.runtime.kernels import grouped_product

Compile = Callable[[Variant, list[Any]], Callable[..., tuple[Any, ...]]]


def as_graph(variant: Variant, args: list[Any]) -> Callable[..., tuple[Any, ...]]:
    return variant.graph


def multiplied_out(*results: Tensor) -> Tensor:
    """The gradient that leaves a variant as `results`."""
    if len(results) == 3:
        return grouped_product(*results)
    return results[0] @ results[1] if len(results) == 2 else results[0]


class Layerwise:
    """`captured`, fed with the tensors of `model`. `compile_variant(variant, args)` says how variants run; `chunk`, how many
    positions of a sequence at a time."""

    def __init__(self, captured: CapturedModel, model: nn.Module, compile_variant: Compile = as_graph, chunk: int = 0) -> None:
        self.captured, self.compile, self.chunk = captured, compile_variant, chunk
        tensors = [*model.named_buffers(), *model.named_parameters()]
        self.tensors = {name: tensor.detach() for name, tensor in tensors}
        self.owned = {t.untyped_storage().data_ptr() for t in self.tensors.values() if t.numel()}

    def run(self, call: Call, variant_name: str, args: list[Any]) -> tuple[Any, ...]:
        variant = self.captured.templates[call.template].variant(variant_name, self.chunk)
        args = [a if i in variant.reads else None for i, a in enumerate(args)]
        results = self.compile(variant, args)(*args)
        for result in results:
            if isinstance(result, Tensor) and result.numel():
                address = result.untyped_storage().data_ptr()
                assert address not in self.owned, f"{variant_name} returns a weight's memory"
        return results

    def bind(
        self, call: Call, batch: dict[str, Tensor], previous: Any, shared: Any, loss_denominator: Tensor | None
    ) -> list[Any]:
        read = {
            "parameter": lambda s: self.tensors[s.name], "buffer": lambda s: self.tensors[s.name],
            "batch": lambda s: batch.get(s.name), "size": lambda s: batch[s.name].shape[s.index],
            "carried": lambda s: previous[s.index], "shared": lambda s: shared[s.index],
            "loss_denominator": lambda s: loss_denominator,
        }
        return [read[s.kind](s) for s in call.sources]

    @torch.no_grad()
    def loss_and_gradients(
        self, batch: dict[str, Tensor], saving: bool, loss_denominator: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One forward and backward: with `saving` by forward_saving and backward, else by recompute_backward."""
        if loss_denominator is None and self.captured.count_targets is not None:
            loss_denominator = self.captured.count_targets(batch)
        *body, epilogue = self.captured.calls
        outputs, bound, saved = None, {}, {}
        shared: Any = ()
        for call in body:
            template = self.captured.templates[call.template]
            bound[call.name] = self.bind(call, batch, outputs, shared, None)
            results = self.run(call, "forward_saving" if saving else "forward", bound[call.name])
            outputs, saved[call.name] = results[: template.outputs], results[template.outputs:]
            if call.name == "prologue":
                shared = outputs
        gradients: dict[str, Tensor] = {}
        args = self.bind(epilogue, batch, outputs, shared, loss_denominator)
        loss, *_ = results = self.run(epilogue, "loss", args)
        arriving = self.scatter(epilogue, "loss", results, gradients)
        for call in reversed(body):
            template = self.captured.templates[call.template]
            tangents = [arriving[i] for i, wanted in enumerate(template.has_gradient) if wanted]
            residuals = saved[call.name] if saving else ()
            name = "backward" if saving else "recompute_backward"
            results = self.run(call, name, [*bound[call.name], *residuals, *tangents])
            arriving = self.scatter(call, name, results, gradients)
        return loss, gradients

    def scatter(
        self, call: Call, variant_name: str, results: tuple[Any, ...], gradients: dict[str, Tensor]
    ) -> dict[int, Tensor]:
        """Adds parameters' gradients to `gradients`; returns those of carried inputs by output of the previous call."""
        carried = {}
        for gradient in self.captured.templates[call.template].variant(variant_name, self.chunk).gradients:
            tensors = [results[i] for i in gradient.results]
            value = multiplied_out(*tensors)
            source = call.sources[gradient.input]
            if source.kind == "carried":
                carried[source.index] = value
            else:
                name = source.name
                gradients[name] = gradients[name] + value if name in gradients else value
        return carried

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor], variant_name: str) -> tuple[Any, ...]:
        """Results of `evaluate`, or of `logits`, which needs no labels in `batch`."""
        outputs: Any = None
        shared: Any = ()
        *body, epilogue = self.captured.calls
        for call in body:
            outputs = self.run(call, "forward", self.bind(call, batch, outputs, shared, None))
            shared = outputs if call.name == "prologue" else shared
        count = self.captured.count_targets
        loss_denominator = count(batch) if count is not None and variant_name != "outputs" else None
        return self.run(epilogue, variant_name, self.bind(epilogue, batch, outputs, shared, loss_denominator))
