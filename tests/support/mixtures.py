"""Small mixtures of many experts, whose layers take turns on a device, and what is copied for each call of them."""
from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from tiny_configs import tiny_config
from tiny_models import batch
from torch import Tensor, fx
from transformers import AutoModelForCausalLM

import megacompile
from megacompile.ir.program import Lane, argument
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.runtime.frame import Frame
from megacompile.runtime.operations import OPERATIONS
from megacompile.streaming.device_copy import Turns, original_class

#: Of so many experts a router chooses so many for a token.
EXPERTS, CHOSEN = 16, 2
#: Tokens that `generated` generates: a call for the prompts, then a call for each further token.
NEW = 5


def build(family: str, dtype: torch.dtype = torch.float32, wide: int = 48) -> Any:
    """`wide`: the width of feed-forward layers. Blocks of codes are of 32 and 64 weights."""
    torch.manual_seed(0)
    config = tiny_config(family)
    vars(config).update({name: wide for name, value in vars(config).items() if value == 48 and isinstance(value, int)})
    for name in {"num_experts", "n_routed_experts", "num_local_experts"} & vars(config).keys():  # one, or none
        setattr(config, name, EXPERTS)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model


def models_in_module(families: Collection[Any]) -> tuple[Any, Any, Any]:
    """Fixtures that the tests of one module share: a family, its plain model, and the same model streamed."""
    @pytest.fixture(scope="module", params=families)
    def family(request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="module")
    def plain(family: str) -> Any:
        return build(family)

    @pytest.fixture(scope="module")
    def streamed(plain: Any) -> Iterator[Any]:
        model = megacompile.stream(copy.deepcopy(plain), device="cpu")
        yield model
        model.megacompile.close()

    return family, plain, streamed


class Copies:
    """What each call of a model has copied: bytes by op, and the experts of each layer."""

    def __init__(self, patch: pytest.MonkeyPatch, backend: type[Backend] = ThreadBackend) -> None:
        self.calls: list[tuple[Frame, Counter[str], list[Sequence[int]]]] = []
        self._bytes = 0
        copy_bytes = backend.copy

        def counted(there: Backend, destination: Tensor, source: Tensor, lane: Lane) -> None:
            self._bytes += source.numel()
            copy_bytes(there, destination, source, lane)

        patch.setattr(backend, "copy", counted)
        for name in ("prefetch", "prefetch_routed"):
            patch.setitem(OPERATIONS, name, functools.partial(self._copied, OPERATIONS[name], name))

    def _copied(self, run: Any, name: str, frame: Frame, node: fx.Node) -> Any:
        frame.arena.slots[argument(node, "into")].fill_(0xFF)  # NaN, where nothing is copied
        frame.backend.synchronize()
        if not any(known is frame for known, *_ in self.calls):
            self.calls.append((frame, Counter(), []))
        (_, count, experts), = [call for call in self.calls if call[0] is frame]
        before = self._bytes
        made = run(frame, node)
        count[name] += self._bytes - before
        if name == "prefetch_routed":
            experts.append(frame.read(node, "router").experts)
        return made

    def of(self, call: int) -> Counter[str]:
        return self.calls[call][1]

    def routed(self) -> int:
        """How many layers have copied chosen experts so far."""
        return sum(len(experts) for _, _, experts in self.calls)


def in_turns(model: Any) -> Any:
    """A context with the plain model, all of whose layers take turns."""
    return model.megacompile.device_copy.use(original_class(model), 0, Turns.ALL)


@torch.no_grad()
def generated(model: Any, rows: int, **how: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits of each step, [steps, rows, vocabulary]."""
    torch.manual_seed(5)
    prompt = batch(4, rows, 7)["input_ids"].clamp_min(8).to(next(iter(model.parameters())).device)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, pad_token_id=0,
                           eos_token_id=None, use_cache=True, return_dict_in_generate=True, output_logits=True, **how)
    return found.sequences, torch.stack(found.logits)
