"""Whether a device can multiply in float8, and whether a model has products for it."""
from __future__ import annotations

from collections.abc import Iterable

import torch

from megacompile.errors import UnsupportedError
from megacompile.frontend.templates.template import Template
from megacompile.ir.precision import Float8
from megacompile.predict.hardware import Hardware

#: The first compute capability with products in float8: Ada's. Hopper has 9.0.
FIRST_CAPABILITY = (8, 9)
_REMEDY = "leave precision out, or use precision='float8-emulated', which rounds alike but is slower"


def check_float8(recipe: Float8 | None, device: torch.device, hardware: Hardware | None = None) -> None:
    """Raises `UnsupportedError` if the device cannot multiply in float8, as far as that is known. `hardware`: the machine that
    is planned for; None: this one."""
    if recipe is None or recipe.emulated:
        return
    if device.type != "cuda":
        raise UnsupportedError(f"a CPU cannot multiply in float8: {_REMEDY}")
    if hardware is not None:
        if "float8" not in hardware.gemm_flops:
            raise UnsupportedError(f"{hardware.name} has no rate for products in float8, as GPUs before Ada (compute capability "
                                   f"8.9) have none: {_REMEDY}, or measure a newer GPU with megacompile calibrate")
    elif torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < FIRST_CAPABILITY:
        major, minor = capability
        raise UnsupportedError(f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor} and cannot multiply "
                               f"in float8, which takes 8.9 (Ada, Hopper or later): {_REMEDY}")


def check_products(templates: Iterable[Template], model: str, recipe: Float8 | None) -> None:
    """Raises `UnsupportedError` if there is a recipe and no product of a model's layers would be in float8. `model`: its class.
    """
    if recipe is None:
        return
    products = [product for template in templates for product in template.products]
    if all(reason for _, reason in products):
        why = next((f" ({names[0]} {reason})" for names, reason in products if names), "")
        raise UnsupportedError(f"no product of {model}'s layers would be computed in float8{why}: leave precision out, or give a "
                               "megacompile.Float8 with another min_features or keep")
