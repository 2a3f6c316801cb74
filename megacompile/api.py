"""`stream(model)` turns a model into a streamed model, in place."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megacompile.compat.inductor import wake_compilers
from megacompile.errors import CaptureError, MegacompileError, UnsupportedError
from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.ops.attention_kernels import fused_kernel
from megacompile.frontend.ops.exchanges import connect_sequences
from megacompile.frontend.pipeline import Watch
from megacompile.frontend.tracing.fake_model import streamed_dtype
from megacompile.frontend.tracing.layers import Layers, find_layers
from megacompile.frontend.tracing.peft_tracing import blaming_adapters, refuse_virtual_tokens
from megacompile.ir.program import Lane
from megacompile.passes.template import Target
from megacompile.planning.config import StreamConfig
from megacompile.planning.device import compute_device, connected_ranks, device_budget, device_of_rank, rank_in_job
from megacompile.planning.expert_split import expert_pieces
from megacompile.planning.host_needs import StateChoice, check_host_first, check_tiles
from megacompile.planning.memory_budget import spend_pinned_memory
from megacompile.planning.precision import check_float8, check_products
from megacompile.runtime.backends.cuda import CudaBackend
from megacompile.runtime.backends.lanes import Backend
from megacompile.runtime.backends.threads import ThreadBackend
from megacompile.runtime.memory.divided import Division
from megacompile.runtime.memory.store import WEIGHTS, SharedTileMemory, Store, copy_from_first_host
from megacompile.runtime.ranks import Ranks
from megacompile.sizes import parse_bytes
from megacompile.streaming.differentiable_results import refuse_hooks
from megacompile.streaming.handle import Handle
from megacompile.streaming.streamed import Streamed
from megacompile.streaming.streamed_module import streamed_class
from megacompile.streaming.user_tensors.divided import divided
from megacompile.streaming.user_tensors.owners import check_unclaimed, claim
from megacompile.system.host_memory import available_host_bytes
from megacompile.system.progress import under_way
from megacompile.weights.empty_models import build_store, fill_buffers
from megacompile.weights.quantizing import adopt_bitsandbytes
from megacompile.weights.saving import forget_quantized_layout
from megacompile.weights.tiling import Tiling, check_device_memory

M = TypeVar("M", bound=nn.Module)


def stream(model: M, *, layers: Layers | None = None, example: Mapping[str, Tensor] | None = None, **options: Any) -> M:
    """Moves a model's weights into host tiles, from which it trains layer by layer. Returns the same object.

    Args:
        model: a causal language model from transformers; any decoder `nn.Module` whose forward returns its loss; or a model
            without a head (`AutoModel`), from whose output the caller computes a loss. With several ranks, the weights are
            those of rank 0. The models of other ranks may be on the meta device, and then take no memory.
        layers: qualified name of the `nn.ModuleList` of layers, or several names. Needed only if they are not found.
        example: a batch with the arguments that the model takes, if these are not `input_ids` and, for a model that takes
            them, `labels`: integer tensors [batch, length], or one value for each row, [batch] or floats [batch, n]. For a
            model that shall take images, a batch with images.
        options: the fields of `StreamConfig`.

    Raises, before the model has changed: `CaptureError`, `UnsupportedError`, `InsufficientMemoryError`,
    `DeviceUnavailableError`, and `MegacompileError` for an option out of range.
    """
    check_module(model)
    if getattr(model, "megacompile", None) is not None:
        raise MegacompileError("the model is streamed already: call model.megacompile.close() before streaming it with other "
                               "options")
    config = StreamConfig.of(**options)
    if any(p.is_meta for p in model.parameters()) and (config.distributed is False or rank_in_job() == 0):
        raise UnsupportedError("the model is on the meta device and has no weights to train: load them first (with several "
                               "ranks, on rank 0), or call megacompile.schedule(model, ...) to inspect its schedule")
    adopt_bitsandbytes(model)
    return attach(model, build_store, config, layers, example)


def attach(model: M, fill: Callable[..., Store], config: StreamConfig, layers: Layers | None,
           example: Mapping[str, Tensor] | None) -> M:
    """Like `stream`, for a model whose weights may not be loaded yet. `fill(model, tiling, memory=...)` creates
    the tiles in that `TileMemory` (None: of this process) and makes the model's parameters views of them."""
    device = device_of_rank(config)
    ranks = connected_ranks(config, device)
    try:
        return _attach(model, fill, config, layers, example, make_backend(device), ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.failed(error)
        raise


def _attach(model: M, fill: Callable[..., Store], config: StreamConfig, layers: Layers | None,
            example: Mapping[str, Tensor] | None, backend: Backend, ranks: Ranks | None) -> M:
    check_float8(config.recipe, backend.device)
    device_bytes = device_budget(config, backend.free_bytes())
    there = available_host_bytes()  # after the device's, which collects garbage: maybe a model that was dropped
    if ranks is not None and config.device_memory is not None:
        device_bytes -= ranks.exchanges.device_bytes  # what is free does not contain them
    agreed: list[str] = []
    if ranks is not None:
        if ranks.hosts.spread > 1 and config.disk is not None:
            raise UnsupportedError("disk keeps moments in files of one host, and this copy of the model is divided among "
                                   "hosts: leave disk out, or divide the copy among more hosts")
        if ranks.hosts.spread > 1 and ranks.sequence_ranks > 1:
            raise UnsupportedError("a copy of the model that is divided among hosts cannot divide sequences too: leave the "
                                   "mesh's dimension 'sequence' out, or give each host a copy")
        fill_buffers(model, ranks)
        there //= ranks.hosts.beside  # they share the machine's memory
        # all ranks must make the same plans
        agreed = [name for name in ("device_memory", "host_memory") if getattr(config, name) is None]
        there, device_bytes = map(min, zip(*ranks.agree("stream", (there, device_bytes)), strict=True))
        config = replace(config, device_memory=device_bytes, host_memory=min(there, parse_bytes(config.host_memory) or there))
    captured, tiling = analyse(model, config, backend.device.type, layers, example, fused_kernel(backend.device), device_bytes,
                               min(there, parse_bytes(config.host_memory) or there),
                               *((1, 1) if ranks is None else (ranks.hosts.ranks, ranks.hosts.copies, ranks.hosts.spread)))
    check_tiles(tiling, min(available_host_bytes(), parse_bytes(config.host_memory) or there), config)
    check_device_memory(tiling, device_bytes)
    spend_pinned_memory(tiling, parse_bytes(config.pinned_memory), config.gradient_slabs)
    if backend.device.type == "cuda" and config.compile is not False:
        wake_compilers()  # beside the weights
    division = None if ranks is None else Division.of(tiling.layouts.values(), ranks)
    with under_way(f"moving the weights of {type(model).__name__} into tiles"):
        store = fill(model, tiling, memory=None if ranks is None else SharedTileMemory(tiling.host.values(), ranks, division))
    if ranks is not None:
        store.divide(tiling.layouts, ranks.hosts.local, ranks.hosts.ranks, division)
        ranks.agree("stream")  # every tile of the first host is filled
        copy_from_first_host(store, ranks, WEIGHTS)
        ranks.agree("stream")
        if division is not None:
            for name, parameter in model.named_parameters():
                if name in tiling.position:
                    divided(parameter, name)
    streamed = Streamed(model, captured, tiling, store, backend, config, ranks, agreed)
    claim(streamed)
    handle = Handle(streamed)
    model.__dict__["megacompile"] = handle
    model.__class__ = streamed_class(type(model))
    forget_quantized_layout(model)
    if ranks is not None:
        if ranks.sequence_ranks > 1:
            connect_sequences(ranks.sequence_ranks, ranks.sequence)
        ranks.watch_device(lambda: backend.busy(Lane.COLLECTIVE))
    return model


def check_module(model: Any) -> None:
    """Raises `MegacompileError` if `model` is not a `torch.nn.Module`."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise MegacompileError(f"a model must be a torch.nn.Module, not {what}: build or load the model first")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise MegacompileError(f"{type(model).__name__} copies a model to each device, which a streamed model does not need: "
                               "pass the model itself (.module)")
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules:
            what = f"{name} is" if name else "this is"
            raise MegacompileError(f"{what} what torch.compile returned, which cannot be captured: pass the model itself "
                                   "(._orig_mod); stream(compile=True) compiles it")


def make_backend(device: str | torch.device | None) -> Backend:
    chosen = compute_device(device)
    return CudaBackend(chosen.index) if chosen.type == "cuda" else ThreadBackend()


def analyse(model: nn.Module, config: StreamConfig, device_type: str, layers: Layers | None,
            example: Mapping[str, Tensor] | None, fused_attention: str = "flash",
            device_bytes: int | None = None, host_bytes: int | None = None,
            ranks: int = 1, hosts: int = 1, spread: int = 1, watch: Watch | None = None,
            choice: StateChoice | None = None) -> tuple[CapturedModel, Tiling]:
    """Captures a model for a device and divides its parameters into tiles, without changing it. `fused_attention`: see
    `Target`. `device_bytes`: the device's memory; with None, experts are split only if the user asks for it. `host_bytes`: the
    host's memory, which is checked before the capture; with None, it is not. `choice`: the optimizer's state; None: it is not
    known yet. `ranks`: the number of processes that share a copy of the tiles. `hosts`: the number of copies. `spread`: the
    number of hosts that each is divided among. `watch`: as in `capture`."""
    refuse_virtual_tokens(model)
    with blaming_adapters(model, UnsupportedError):
        refuse_hooks(model)
    check_unclaimed(model)
    if not isinstance(example, Mapping | None):
        raise MegacompileError("example must give the model's arguments by name, such as {'input_ids': ids}, not a "
                               f"{type(example).__name__}")
    if wrong := [key for key, value in (example or {}).items() if not isinstance(value, Tensor)]:
        raise MegacompileError(f"example[{wrong[0]!r}] must be a tensor, as the model's forward takes it, not a "
                               f"{type((example or {})[wrong[0]]).__name__}")
    dtypes = {streamed_dtype(p, config.dtype) for p in model.parameters() if p.is_floating_point() or p.requires_grad}
    if not dtypes <= {torch.float32, torch.bfloat16}:
        raise UnsupportedError(f"parameters are {', '.join(sorted(map(str, dtypes)))}: megacompile trains float32 and "
                               "bfloat16; give dtype=torch.bfloat16, or cast the model to one of them")
    dtype = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
    stack = find_layers(model, layers)
    if host_bytes is not None:
        check_host_first(model, stack, config, host_bytes * spread, device_type, choice)
    pieces = expert_pieces(model, stack, config, device_bytes)
    with blaming_adapters(model, CaptureError):
        captured = capture(model, layers=stack, example=example, pipeline=config.template_passes,
                           target=Target(device_type, dtype, fused_attention, config.recipe), loss=config.loss,
                           expert_pieces=pieces, dtype=config.dtype, watch=watch)
    check_products(captured.templates.values(), model, config.recipe)
    tiling = Tiling.of(model, captured.calls, config.dtype, captured.rows, ranks, hosts, device_type, spread)
    config.check_tiles(tiling.layouts, type(model).__name__)
    return captured, tiling
