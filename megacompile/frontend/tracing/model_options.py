"""Options of a model's config that make it impossible to capture a graph: refused by name, before anything is traced."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile.errors import UnsupportedError
from megacompile.frontend.tracing.layers import LayerStack


class Untraceable(NamedTuple):
    """`read(module)`: the option's name in the module and its value, or None if it is off; `cause` and `remedy` go into the
    message."""

    read: Callable[[nn.Module], tuple[str, Any] | None]
    cause: str
    remedy: str


def _positive(*names: str) -> Callable[[nn.Module], tuple[str, Any] | None]:
    """Reads the first of these attributes that is a number above 0."""
    def read(module: nn.Module) -> tuple[str, Any] | None:
        values = ((name, getattr(module, name, None)) for name in names)
        return next(((name, value) for name, value in values if isinstance(value, int | float) and value > 0), None)
    return read


def _asked_for(name: str) -> Callable[[nn.Module], tuple[str, Any] | None]:
    """Reads a flag of the module's config."""
    def read(module: nn.Module) -> tuple[str, Any] | None:
        value = getattr(getattr(module, "config", None), name, None)
        return (name, value) if value else None
    return read


def divides_weights(config: Any) -> bool:
    """True if a model divides the weights of some layers in place before it evaluates (RWKV)."""
    return 0 < (getattr(config, "rescale_every", None) or 0) <= getattr(config, "num_hidden_layers", 0)


def rope_types(module: nn.Module) -> list[str]:
    """The kinds of rotary frequencies that a module computes; several if types of layers differ."""
    found = getattr(module, "rope_type", None)
    return [each for each in (found.values() if isinstance(found, dict) else (found,)) if isinstance(each, str)]


def _dynamic(module: nn.Module) -> tuple[str, Any] | None:
    return next((("rope_type", each) for each in rope_types(module) if "dynamic" in each), None)


def _experts(module: nn.Module, implementation: str) -> tuple[str, Any] | None:
    """The option of a module of experts that transformers computes with this implementation. Such modules are recognized by
    what transformers' decorator adds."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return ("experts_implementation", chosen) if chosen == implementation and hasattr(module, "is_transposed") else None


def _eager_experts(module: nn.Module) -> tuple[str, Any] | None:
    return _experts(module, "eager")


def _looped_products(module: nn.Module) -> tuple[str, Any] | None:
    """Experts whose weights are not bfloat16, in a version of transformers that cannot trace their products."""
    found = _experts(module, "grouped_mm")
    coded: dict[str, Any] = getattr(module, "stacks", {})  # experts in codes, with the dtype of their values
    weights = [*coded.values(), *(p for p in module.parameters(recurse=False) if p.is_floating_point())]
    bfloat16 = all(each.dtype == torch.bfloat16 for each in weights)
    return None if found is None or bfloat16 or loop_is_an_op() else found


def loop_is_an_op() -> bool:
    """True if the loop in which transformers multiplies such weights during tracing is a separate op, as it is since version
    5.23."""
    from transformers.integrations import moe  # noqa: F401  # registers the op

    return hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")


OPTIONS = (
    Untraceable(_dynamic, "changes the rotary frequencies by the longest sequence that was seen so far",
                'use rope_type="linear" or "yarn", or "default" where no sequence is longer than max_position_embeddings'),
    Untraceable(_eager_experts, "loops over the experts that the tokens of a batch chose",
                'call model.set_experts_implementation("grouped_mm")'),
    Untraceable(_looped_products, "multiplies weights that are not bfloat16 in a loop over the tokens of each expert",
                'upgrade transformers to 5.23, or call model.bfloat16() or model.set_experts_implementation("batched_mm")'),
    Untraceable(_positive("layerdrop"), "skips layers at random", "set it to 0"),
    Untraceable(_positive("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps"),
                "multiplies a router's input by random numbers", "set it to 0"),
    Untraceable(_positive("chunk_size_feed_forward"), "cuts sequences into chunks, as many as one length has",
                "set it to 0, which computes the same"),
    Untraceable(_asked_for("output_hidden_states"), "returns the outputs of all layers from every forward",
                "set it to False, and pass output_hidden_states=True without labels under torch.no_grad() where they are read"),
    Untraceable(_asked_for("output_attentions"), "returns the attention weights of all layers from every forward",
                "set it to False"),
)


def refuse_options(model: nn.Module, stack: LayerStack) -> None:
    """Raises `UnsupportedError` for the first of `OPTIONS` that is on, in the layers of a stack or around them. Encoders
    outside the stack may have such options, since a model that trains on text does not run them."""
    for path, module in _around_and_within(model, stack):
        for option in OPTIONS:
            if (found := option.read(module)) is not None:
                name = config_name(model, module, *found)
                owner = f"{path} ({type(module).__name__})" if path else "the model"
                own = f", or {path}.{found[0]} of a model that is built already," if hasattr(module, found[0]) and path else ""
                remedy = option.remedy.replace("set it to", f"set {name}{own} to") if own else option.remedy
                raise UnsupportedError(f"{type(model).__name__} cannot be captured with {name}={found[1]!r}, by which {owner} "
                                       f"{option.cause}: {remedy}")


def config_name(model: nn.Module, module: nn.Module, attribute: str, value: Any) -> str:
    """The config's name for an option that a module stores as `attribute`: `layerdrop` may come from `decoder_layerdrop`."""
    for config in (getattr(each, "config", None) for each in (module, model)):
        held = vars(config).items() if config is not None else ()
        fields = [key.lstrip("_") for key, each in held if key.endswith(attribute) and each == value]
        if fields:
            return min(fields, key=lambda key: (key != attribute, "encoder" in key))
    return attribute


def _around_and_within(model: nn.Module, stack: LayerStack) -> Iterator[tuple[str, nn.Module]]:
    """The modules that contain the layers or are inside them, and the modules directly next to the layers: rotary tables,
    embeddings."""
    above = {""} | {name[:i] for name in stack.names for i, letter in enumerate(name) if letter == "."}
    layers = tuple(f"{name}." for name in stack.names)
    for path, module in model.named_modules():
        if path in above or path.rpartition(".")[0] in above or f"{path}.".startswith(layers):
            yield path, module
