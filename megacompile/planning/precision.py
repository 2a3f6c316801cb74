"""Checks whether a device can multiply in float8, whether a model has products for it, and which ones these are."""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.frontend.capture import CapturedModel
from megacompile.frontend.templates.template import Call, Template
from megacompile.ir.precision import Float8, is_part_of
from megacompile.predict.hardware import Hardware

#: The first compute capability with products in float8: Ada's. Hopper has 9.0.
FIRST_CAPABILITY = (8, 9)
#: Number of products that stay in their dtype for the same reason that are listed by name.
_LISTED = 6
_REMEDY = "leave precision out, or use precision='float8-emulated', which rounds the same way but is slower"


def check_float8(recipe: Float8 | None, device: torch.device, hardware: Hardware | None = None) -> None:
    """Raises `UnsupportedError` if the device is known to be unable to multiply as the recipe says. `hardware`: the machine
    that is planned for; None: this one."""
    if recipe is None or recipe.emulated:
        return
    if device.type != "cuda":
        raise UnsupportedError(f"a CPU cannot multiply in float8: {_REMEDY}")
    if hardware is not None:
        if "float8" not in hardware.gemm_flops:
            raise UnsupportedError(f"{hardware.name} has no rate for products in float8, which take compute capability 8.9 "
                                   f"(Ada, Hopper or later): {_REMEDY}, or measure a newer GPU with megacompile calibrate")
    elif torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < FIRST_CAPABILITY:
        major, minor = capability
        raise UnsupportedError(f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor} and cannot "
                               f"multiply in float8, which takes 8.9 (Ada, Hopper or later): {_REMEDY}")


def check_products(templates: Iterable[Template], model: nn.Module, recipe: Float8 | None) -> None:
    """Raises `UnsupportedError` if there is a recipe and no product of the model's layers would be in float8, and
    `MegacompileError` if the recipe keeps a module that the model does not have."""
    if recipe is None:
        return
    kind = type(model).__name__
    for part in recipe.keep:
        if not any(is_part_of(part, module) for module, _ in model.named_modules()):
            raise MegacompileError(f"Float8 keep={part!r} is in no name of {kind}'s modules: give names, or dot-separated "
                                   "parts of them, such as 'down_proj' or 'model.layers.0'")
    products = [product for template in templates for product in template.products]
    if all(reason for _, reason in products):
        why = next((f" ({of[0].rpartition('.')[0]} {reason})" for of, reason in products if of), "")
        raise UnsupportedError(f"no product of {kind}'s layers would be computed in float8{why}: leave precision out, stream "
                               "with dtype=torch.bfloat16 if the model has another dtype, or give a megacompile.Float8 with "
                               "another min_features or keep")


def described_products(captured: CapturedModel) -> Iterator[str]:
    """Lines that list the products of a model that are computed in float8, and why others are not; none without a recipe."""
    recipe = next((template.precision for template in captured.templates.values()), None)
    if recipe is None:
        return
    yield _described(recipe)
    for name, template in captured.templates.items():
        calls = [call for call in captured.calls if call.template == name]
        if not calls or calls[0] in (captured.calls[0], captured.calls[-1]):
            continue
        rounded = [_modules(of, calls[0]) for of, reason in template.products if not reason]
        yield f"  {len(calls)} calls of {name}: {', '.join(rounded) or 'no product'}"
        reasons = dict.fromkeys(reason for _, reason in template.products if reason)
        for reason in reasons:
            stay = [*dict.fromkeys(_modules(of, calls[0]) for of, why in template.products if why == reason)]
            more = f" and {len(stay) - _LISTED} more" if len(stay) > _LISTED else ""
            yield f"    stays, since it {reason}: {', '.join(stay[:_LISTED])}{more}"
        if template.forward_graph().find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default):
            yield "    grouped products of experts stay"
    yield "  embedding and head stay"


def _described(recipe: Float8) -> str:
    how = "emulated, " if recipe.emulated else ""
    scales = "each operand" if recipe.scaling == "tensor" else "each row"
    return (f"float8 ({how}one scale for {scales}; output gradients in {recipe.gradients}; weight gradients in "
            f"{recipe.weight_gradients}, summed in FP32):")


def _modules(parameters: tuple[str, ...], call: Call) -> str:
    """The modules of the parameters from which a product's weight is computed, in the layer."""
    modules = dict.fromkeys(name.removeprefix(f"{call.name}.").rpartition(".")[0] for name in parameters)
    return " and ".join(modules) or "a product of activations"
