"""The frontend: a model -> templates and calls."""
from __future__ import annotations

from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.layers import register_layers
from megacompile.frontend.template import Call, Gradient, Source, Template, TemplateInput, Variant
from megacompile.frontend.variants import compile_variant

__all__ = [
    "Call", "CapturedModel", "Gradient", "Source", "Template", "TemplateInput", "Variant", "capture", "compile_variant",
    "register_layers",
]
