"""What a layer keeps of each sequence for later tokens, as transformers' caches do: keys and values, and recurrent states."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.frontend.ops.mixer_ops import op_name
from megacompile.frontend.templates.template import Template


@dataclass(frozen=True)
class LayerCache:
    """Bytes for each sequence: `token` for each of its last `window` tokens (0: of all), and `state` whatever its length.
    `read`: bytes of keys and values that attention reads for a token, more than are kept if it computes them from these.
    `attentions`: how many read them."""

    token: int = 0
    read: int = 0
    attentions: int = 0
    window: int = 0
    state: int = 0

    def token_bytes(self, tokens: int) -> int:
        return self.token * min(tokens, self.window or tokens)


def layer_cache(template: Template) -> LayerCache:
    """The bytes that the attention, recurrences and convolutions of a template keep. States of recurrences are in fp32."""
    token, state, windows = 0, 0, list[int]()
    for node in template.forward_graph().nodes:
        given: Any = [x.meta.get("val") if isinstance(x, fx.Node) else x for x in node.args]
        match op_name(node.target):
            case "megacompile.attention":
                token += sum(x.shape[1] * x.shape[3] * x.element_size() for x in given[1:3])
                windows.append(given[4])
            case "megacompile.recurrence":
                state += given[1].shape[3] * given[2].shape[2] * given[2].shape[3] * 4
            case "megacompile.causal_conv":
                state += given[1].numel() * given[0].element_size()
    return LayerCache(int(token), int(token), len(windows), windows[0] if len(set(windows)) == 1 else 0, int(state))
