"""The class of a streamed model: calls go to the handle, and reads wait for updates in flight."""
from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import parse_to, pytree
from megacompile.errors import UnsupportedError
from megacompile.ir.program import Lane
from megacompile.streaming.device_copy import Turns, original_class
from megacompile.streaming.generation.shared_prompts import generate_sharing
from megacompile.streaming.generation.ways import (
    Finished,
    Way,
    by_name,
    chooses_cache,
    generate_in_parts,
    option_of,
    ways_to_generate,
    with_options,
)
from megacompile.streaming.handle import Handle
from megacompile.streaming.programs.captures import base_calls_streamed
from megacompile.streaming.shared_writes import loading
from megacompile.streaming.user_tensors.divided import put
from megacompile.streaming.whole_values import whole_weights_in_a_file, with_whole_weights
from megacompile.weights.saving import save_whole


class StreamedModule(nn.Module):
    """Overrides of a streamed model's class: calls go to the handle, and reads wait for updates in flight."""

    if TYPE_CHECKING:  # transformers evaluates the annotations of a model's class when the class is created
        megacompile: Handle

    @torch.compiler.disable(reason="a streamed model's layers are compiled by megacompile: leave torch.compile out")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.megacompile.call(self, super().forward, args, kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Called by `to()` of an enclosing module. Does nothing if `fn` leaves a tensor on the compute device unchanged."""
        streamed = self.megacompile.streamed
        probes = [torch.empty(0, dtype=dtype, device=streamed.backend.device)
                  for dtype in {p.dtype for p in streamed.parameters.values()}]
        changed = [moved for probe in probes if (moved := fn(probe)) is not probe]
        if not changed:
            return self
        for moved in changed:
            self.to(moved.device, moved.dtype)  # raises an error that names the device or the dtype
        raise UnsupportedError("a streamed model's weights cannot be moved or cast: model.megacompile.close() first")

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = parse_to(*args, **kwargs)
        here = self.megacompile.streamed.backend.device
        if dtype is not None and self.megacompile.streamed.dtypes != {dtype}:
            raise UnsupportedError(f"a streamed model cannot be cast to {dtype}: close() it first, or give dtype= to stream()")
        if device is not None and (device.type != here.type or device.index not in (None, here.index or 0)):
            raise UnsupportedError(f"a streamed model computes on {here} and cannot be moved to {device}: close() it first")
        return self

    def cuda(self, device: Any = None) -> Any:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> Any:
        return self.to("cpu")

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.megacompile.streamed.settle()
        return super().named_parameters(*args, **kwargs)

    def named_modules(self, memo: set[nn.Module] | None = None, *args: Any, **kwargs: Any) -> Any:
        if memo is not None:  # called by an enclosing module, whose `parameters()` must wait like ours
            self.megacompile.streamed.settle()
        return super().named_modules(memo, *args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.megacompile.streamed.rank_group.agree("zero_grad")  # a rank may still read what this one overwrites
            self.megacompile.whole()  # an update in flight reads gradients, and one that stopped half-way still needs them
            super().zero_grad(set_to_none)
            return
        for _, parameter in nn.Module.named_parameters(self):  # our own method would wait for the update
            parameter.grad = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.megacompile.whole()
        streamed = self.megacompile.streamed
        if streamed.store.division is None:
            return super().state_dict(*args, **kwargs)
        found = super().state_dict(*args, **{**kwargs, "keep_vars": True})
        found.update(with_whole_weights(streamed, found, "state_dict"))
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a state. Writing all weights also repairs weights that an update left half-way."""
        if kwargs.get("assign"):
            raise UnsupportedError("load_state_dict(assign=True) would replace parameters that live in host tiles: leave "
                                   "assign out")
        streamed = self.megacompile.streamed
        with streamed.call_lock, loading(streamed, "load_state_dict"):
            divided = streamed.store.division is not None
            with streamed.writes.ignoring(streamed.parameters if divided else self._own_values(state_dict)):
                if streamed.store.shared:
                    state_dict = self._without_tiles_of_others(state_dict)
                try:
                    result = super().load_state_dict(state_dict, *args, **kwargs)
                except RuntimeError:  # values that fit were loaded although others did not
                    if streamed.store.shared:
                        streamed.adopt_writes()
                    raise
            if streamed.store.shared:
                streamed.adopt_writes()
            if not result.missing_keys:
                streamed.step.weights_replaced()
        return result

    def _own_values(self, state_dict: Mapping[str, Any]) -> list[str]:
        """The names of parameters whose values in a state are the parameters' own memory."""
        return [name for name, parameter in nn.Module.named_parameters(self)
                if isinstance(given := state_dict.get(name), torch.Tensor) and given.data_ptr() == parameter.data_ptr()]

    def _without_tiles_of_others(self, state_dict: Any) -> Any:
        """The state that `load_state_dict` is given: parameters that another rank writes are replaced by their own values, so
        that all are checked and these do not change. Those that hosts divide are written here, what this host has of them."""
        position, store = self.megacompile.streamed.tiling.position, self.megacompile.streamed.store
        first = {id(p): name for name, p in nn.Module.named_parameters(self)}
        divided = store.division is not None
        state_dict = copy.copy(state_dict)  # with its metadata
        for name, parameter in nn.Module.named_parameters(self, remove_duplicate=False):
            tile, index = position.get(first[id(parameter)], (None, 0))
            if tile is None or (store.writes(tile) and not divided):
                continue
            if getattr(given := state_dict.get(name), "shape", None) == parameter.shape:
                if store.writes(tile):  # what this host has of it
                    put(store.tiles[tile], index, "weight", given)
                    if store.tiles[tile].remainder is not None:
                        put(store.tiles[tile], index, "remainder", torch.zeros(parameter.shape, dtype=torch.int16))
                state_dict[name] = parameter
        return state_dict

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A plain CPU model with the same weights."""
        self.megacompile.whole()
        plain = object.__new__(original_class(self))
        memo[id(self)] = plain
        plain.__dict__ = copy.deepcopy({k: v for k, v in self.__dict__.items() if k != "megacompile"}, memo)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a streamed model cannot be pickled: use save_pretrained, state_dict, or copy.deepcopy(model)")


class StreamedPretrained(StreamedModule):
    """Overrides for transformers models."""

    @property
    def device(self) -> torch.device:
        """The compute device. Trainer sends batches there."""
        return self.megacompile.streamed.backend.device

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> Any:
        """Like transformers' method, written from the tiles, in shards of 5 GB by default. The folder keeps the old checkpoint
        until the new one is complete. Waits for an update in flight. With several ranks, rank 0 writes and the others return at
        once: the weights do not change before it takes part in the next step. Raises `CheckpointError` if it cannot be
        written."""
        self.megacompile.whole()
        streamed = self.megacompile.streamed
        if streamed.tiling.quantized and not (hasattr(self, "peft_config") or getattr(self, "_hf_peft_config_loaded", False)):
            raise UnsupportedError("quantized weights are not saved as a model: save the adapter, or close() the model and "
                                   "call megacompile.dequantize(model) first")
        ranks = streamed.rank_group.ranks
        if streamed.store.division is not None and options.get("state_dict") is None:
            options["state_dict"] = whole_weights_in_a_file(streamed, Path(save_directory))
        if ranks is not None and ranks.rank != 0:
            return None
        return save_whole(super().save_pretrained, save_directory, **options)  # type: ignore[misc]

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, since the plan decides what is recomputed (`checkpoint_interval`). Trainers call this by default."""

    activation_checkpointing_enable = gradient_checkpointing_enable

    @property
    def is_gradient_checkpointing(self) -> bool:
        """As in transformers, without the warning that the name is deprecated: TRL's trainers read it in every generation."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

    def enable_input_require_grads(self) -> None:
        """Does nothing. Trainers call this when parameters are frozen, since PyTorch's checkpointing needs an input with a
        gradient."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates with the plain model on the device, if all its layers fit, or if some of them can take turns (`on_device`).
        If the keys and values of all tokens do not fit, parts of the batch generate one after another, or keys and values stay
        in host memory. Otherwise streams all layers for every token, without a cache, which is slow."""
        # The parameters are on the CPU, so callers that send prompts to a parameter's device send them there.
        given = pytree.tree_map_only(Tensor, lambda each: each.to(self.device), by_name(super().generate, args, kwargs))  # type: ignore[misc]
        if self.megacompile.streamed.store.division is not None:
            raise UnsupportedError("a model that hosts divide cannot generate, since each rank would need all of its weights: "
                                   "save_pretrained it, and generate with a copy on one host")
        device_copy, finished = self.megacompile.device_copy, Finished()
        ways = ways_to_generate(self, given, device_copy.arrangement)
        way = next(ways, None)
        while way is not None:
            try:
                return generate_by(self, way, finished)
            except torch.OutOfMemoryError as error:
                ended = str(error).splitlines()[0]
            # The error, and with it the copy and all values of the generation, is gone here.
            if device_copy.free_slots():
                continue  # the same way has more memory now
            warnings.warn("the device has too little memory for this generation: sequences that are not finished start again "
                          f"with fewer weights or sequences there at a time, which is slower ({ended})", stacklevel=2)
            way = next(ways, None)
        return generate_in_parts(lambda **rest: generate_streamed(self, rest), 1, self, given, finished)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return _for_generation(super().prepare_inputs_for_generation(*args, **kwargs))  # type: ignore[misc]


def generate_by(model: StreamedPretrained, way: Way, finished: Finished) -> Any:
    """Generates in the lane compute, whose free memory the allocator gives to no other stream. `finished`: as in
    `generate_in_parts`."""
    backend = model.megacompile.streamed.backend
    # With some caches transformers compiles forwards, but the first one only in chunks. A user's own loop may read weights.
    compiled = chooses_cache(model, way.arguments) and option_of(model, way.arguments, "prefill_chunk_size") is not None
    early = way.turns is Turns.NONE and not compiled and "custom_generate" not in way.arguments
    use = model.megacompile.device_copy.use(original_class(model), way.bytes, way.turns, early)
    backend.enter(_tensors([way.arguments, finished.tokens]))
    found = None
    try:
        with torch.no_grad(), backend.issuing(Lane.COMPUTE), use as native:
            found = generate_in_parts(lambda **part: generate_sharing(native.generate, native, part),  # type: ignore[arg-type]
                                      way.parts, native, _without_router_losses(native, way.arguments), finished)
    finally:
        backend.exit(_tensors([found, finished.tokens]))
    return found


def _without_router_losses(model: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the auxiliary losses that a config asks for in training. transformers computes them from the routers' logits of
    the new tokens and a mask of all tokens, which raises an error."""
    asks = getattr(model.config.get_text_config(), "output_router_logits", False)
    return {"output_router_logits": False, **given} if asks else given


def generate_streamed(model: StreamedPretrained, given: Mapping[str, Any]) -> Any:
    """Generates with the streamed model. Every token copies all layers, and computes all earlier tokens again."""
    original: Any = original_class(model)
    with torch.no_grad(), base_calls_streamed(model, _for_generation):
        return original.generate(model, **with_options(given, use_cache=False))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _for_generation(inputs: dict[str, Any]) -> dict[str, Any]:
    """Removes the request for only the last token's logits. All are computed, and generation reads the last."""
    inputs.pop("logits_to_keep", None)
    return inputs


_classes: dict[type, type] = {}


def streamed_class(original: type[nn.Module]) -> type:
    """The subclass of a model's class that streams. It keeps the class name, which configs record as the architecture."""
    if original not in _classes:
        streamed = StreamedPretrained if hasattr(original, "save_pretrained") else StreamedModule

        @functools.wraps(original.forward)  # trainers read the model's columns and labels from the signature
        def forward(self: StreamedModule, *args: Any, **kwargs: Any) -> Any:
            return StreamedModule.forward(self, *args, **kwargs)

        body = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__,
                "forward": forward}
        _classes[original] = type(original.__name__, (streamed, original), body)
    return _classes[original]
