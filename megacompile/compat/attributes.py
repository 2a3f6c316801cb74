"""Private attributes of PyTorch's objects that megacompile reads or sets: the class that has each, and what for."""
from __future__ import annotations

from typing import NamedTuple


class Attribute(NamedTuple):
    """`owner`: the qualified name of the class; "" for an attribute that only objects have."""

    owner: str
    purpose: str


ATTRIBUTES = {
    "_backward_hooks": Attribute("torch.Tensor", "refuse hooks on parameters, which a streamed backward would not call"),
    "_buffers": Attribute("", "copy or load a module's own buffers"),
    "_cdata": Attribute("torch.UntypedStorage", "tell whether two tensors share memory"),
    "_dynamo_bytecode_flatten": Attribute("", "learn which parameter each input of a graph of Dynamo's is"),
    "_dynamo_bytecode_unflatten": Attribute("", "rebuild what the model returned around a graph's results"),
    "_expr": Attribute("", "read and rewrite the expression of a size as it was made"),
    "_forward_hooks": Attribute("", "remove and wrap hooks that transformers installed"),
    "_is_view": Attribute("torch.Tensor", "find views: AOT refuses results that alias"),
    "_mod": Attribute("torch.fx.experimental.sym_node.SymNode", "write the padding of a size as a multiple"),
    "_modules": Attribute("", "go through a list's items, None included"),
    "_optimizer_load_state_dict_post_hooks": Attribute("", "call the hooks of an optimizer that loads its state itself"),
    "_optimizer_load_state_dict_pre_hooks": Attribute("", "the same, before it loads"),
    "_parameters": Attribute("", "copy a module's own parameters"),
    "_post_accumulate_grad_hooks": Attribute("torch.Tensor", "refuse these hooks too"),
    "_schema": Attribute("", "find the inputs that an op changes"),
    "_set_replacement": Attribute("torch.fx.experimental.symbolic_shapes.ShapeEnv", "keep a size that is compared a symbol"),
    "_validate_args": Attribute("torch.distributions.Distribution", "switch off checks of values, which fakes lack"),
    "_version": Attribute("torch.Tensor", "see writes to weights from outside"),
}
