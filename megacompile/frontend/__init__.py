"""The frontend: a model -> templates and calls."""
from __future__ import annotations

from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.templates.template import Call, Gradient, Source, Template, TemplateInput, Variant
from megacompile.frontend.templates.variants import compile_variant
from megacompile.frontend.tracing.layers import register_layers

__all__ = [
    "Call", "CapturedModel", "Gradient", "Source", "Template", "TemplateInput", "Variant", "capture", "compile_variant",
    "register_layers",
]
