"""What a model does with a batch argument. A plain run on fakes answers this in a small part of a capture's time."""
from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.compat.core import FakeTensorMode, TorchDispatchMode, pytree, unset_fake_temporarily
from megacompile.errors import CaptureError, UnsupportedError
from megacompile.frontend.tracing.foreign_errors import TRACING_ERRORS
from megacompile.frontend.tracing.native_branches import as_traced


class _Uses(TorchDispatchMode):
    """State: whether an op has made anything but bool of the mask itself."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.counted = False

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(value is self.mask for value in pytree.tree_leaves((args, kwargs))):
            self.counted |= any(isinstance(made, Tensor) and made.dtype != torch.bool for made in pytree.tree_leaves(result))
        return result


class _Meetings(TorchDispatchMode):
    """Computes every value that depends on the `known` ones and on sizes alone, and nothing else: weights and the batch's other
    arguments are fakes. State: `known`, such values by the id of their fakes; `met`, each op that reads such values together
    with unknown ones, in order, with the values."""

    def __init__(self, known: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.known = {id(fake): (fake, value) for fake, value in known}  # holds the fakes, so that no other has their id
        self.met: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        given = (args, kwargs or {})
        read = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
        known = [leaf for leaf in read if id(leaf) in self.known]
        if len(known) < len(read) or torch.Tag.nondeterministic_seeded in function.tags:
            result = function(*args, **given[1])
            if known:
                with unset_fake_temporarily():
                    self.met.append((str(function), [self.known[id(leaf)][1].clone() for leaf in known]))
            if any(result is leaf for leaf in known):  # it has become unknown, and so have its views
                raise UnsupportedError(f"{function} changes a value in place")
            return result
        with unset_fake_temporarily():
            known_args, known_kwargs = pytree.tree_map(lambda leaf: self.known[id(leaf)][1] if isinstance(leaf, Tensor) else
                                                       leaf, given)
            value = function(*known_args, **known_kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            return value  # a number that the model reads from a tensor
        result = function(*args, **given[1])
        for fake, each in zip(pytree.tree_leaves(result), pytree.tree_leaves(value), strict=True):
            if isinstance(fake, Tensor):
                self.known[id(fake)] = fake, each
        return result


def only_hides(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], name: str) -> bool:
    """Whether `model(**batch, **options)`, all fakes, makes nothing but bool of the batch argument `name`. False if this
    cannot be known: an op has no effect on fakes, or the model does not run on them."""
    uses = _Uses(batch[name])
    return _runs(model, {**batch, **options}, uses) and not uses.counted


def is_implied(model: nn.Module, batch: Mapping[str, Any], options: Mapping[str, Any], name: str, value: Tensor) -> bool:
    """Whether `model(**batch, **options)`, all fakes, computes the same with `value` as the batch argument `name` as without
    this argument. `value` is real. False if this cannot be known, as in `only_hides`."""
    without = {key: argument for key, argument in {**batch, **options}.items() if key != name}
    with next(model.parameters()).fake_mode:  # type: ignore[attr-defined]
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    given, left_out = _Meetings([(fake, value)]), _Meetings([])
    return (_runs(model, {**without, name: fake}, given) and _runs(model, without, left_out)
            and len(given.met) == len(left_out.met) and all(map(_equal, given.met, left_out.met)))


def _equal(a: tuple[str, list[Tensor]], b: tuple[str, list[Tensor]]) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(map(torch.equal, a[1], b[1]))


def _runs(model: nn.Module, arguments: Mapping[str, Any], seen_by: TorchDispatchMode) -> bool:
    """Whether the model, all fakes, runs on these arguments under a mode."""
    fakes: FakeTensorMode = next(model.parameters()).fake_mode  # type: ignore[attr-defined]
    try:
        with fakes, torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(), as_traced(model), seen_by:
            warnings.simplefilter("ignore")
            model(**arguments)
    except (UnsupportedError, CaptureError, *TRACING_ERRORS):
        return False
    return True
