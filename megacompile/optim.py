"""AdamW on the host, in full precision, beside the next step's forward."""
from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from megacompile.errors import MegacompileError, UnsupportedError
from megacompile.nonfinite import NonFinite
from megacompile.optimizer_state import OptimizerState
from megacompile.runtime import native
from megacompile.runtime.adam import AdamSegment, join_fp32, split_fp32
from megacompile.runtime.update import Update, counting
from megacompile.streamed import Streamed

#: Which streamed model a parameter belongs to.
_OWNERS: MutableMapping[Tensor, tuple[weakref.ref[Streamed], str]] = WeakIdKeyDictionary()


def claim(streamed: Streamed) -> None:
    """Lets optimizers find the streamed model behind its parameters."""
    for name, parameter in nn.Module.named_parameters(streamed.model):  # those too that no call reads
        _OWNERS[parameter] = (weakref.ref(streamed), name)


def disclaim(streamed: Streamed) -> None:
    for _, parameter in nn.Module.named_parameters(streamed.model):
        if parameter in _OWNERS and _OWNERS[parameter][0]() is streamed:
            del _OWNERS[parameter]


def check_unclaimed(model: nn.Module) -> None:
    """Raises `MegacompileError` if a parameter lives in another model's tiles: two tiles would fight over its memory."""
    for name, parameter in nn.Module.named_parameters(model):
        owner = _OWNERS[parameter][0]() if parameter in _OWNERS else None
        if owner is not None:
            raise MegacompileError(
                f"{name} belongs to a {type(owner.model).__name__} that is streamed already: close() that one first, or give "
                "each model parameters of its own")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


#: What an option of a parameter group must be, and whether a value is that.
_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), ("a number of at least 0", lambda x: _is_number(x) and x >= 0)),
    "betas": ("two numbers of at least 0 and below 1", lambda x: (
        isinstance(x, tuple | list) and len(x) == 2 and all(_is_number(b) and 0 <= b < 1 for b in x))),
}


def _check_options(group: Mapping[str, Any]) -> None:
    """Raises `MegacompileError` for an option of a parameter group that is out of range or that is not implemented."""
    for option in ("amsgrad", "maximize", "differentiable"):
        if group.get(option):
            raise UnsupportedError(f"{option}=True is not implemented by megacompile.AdamW: leave it out")
    for option in ("max_grad_norm", "overlap", "non_finite", "dump_folder"):
        if option in group:
            raise MegacompileError(f"{option} is of all parameters, and not of a group: give it to AdamW itself")
    for option, (what, good) in _OPTIONS.items():
        if option in group and not good(group[option]):
            raise MegacompileError(f"{option}={group[option]!r} is out of range: give {what}")


class AdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` for streamed models: FP32 master weights and moments in host memory, fused, asynchronous.

    `step()` returns at once; the update runs on the host beside the next forward. With `max_grad_norm`, gradients are
    clipped by their exact global norm, as `torch.nn.utils.clip_grad_norm_` does; `grad_norm` is the norm of the last step
    before clipping. `state_dict` holds exp_avg, exp_avg_sq (fp32), step, and for bf16 parameters the FP32 master's 16 low
    bits (`remainder`, int16).

    Parameters of the model that its forward does not read are left alone, as those without a gradient are.

    Changes of `.grad` between backward and step count, in the norm too (those made through `.grad.data` leave no trace, and
    the norm does not see them). A gradient that is None leaves its parameter alone.

    With `overlap="backward"` each tile is updated as its gradients arrive: nothing is clipped, `.grad` stays None (PyTorch's
    own clipping would find nothing), `grad_norm` too, and there is one forward, one backward and one `step()` in turn. The
    backward reads the hyper-parameters; `step()` ends the step, for schedulers' sake, and does nothing without a backward.
    The optimizer that was made last decides whether a model's backward updates.

    Gradients whose norm is not finite update nothing, moments and step counts included, whether gradients are clipped or not.
    `non_finite` says what then: "raise" (a `NonFiniteError` from the next call that waits for the update), "skip" (training
    goes on; `model.megacompile.stats["skipped_steps"]` counts), or "dump" (the batch, and the norm of each gradient, are
    written to a folder in `dump_folder`, and the error is raised). With `overlap="backward"` each tile is looked at when its
    gradients arrive, and one whose gradients are not finite keeps weights and moments, whatever becomes of the others
    (`stats["kept_tiles"]` counts). A step in which nothing was updated is none, unless it was the device that kept a tile:
    that is known later.

    Raises `MegacompileError` for parameters that belong to no streamed model, or to several.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 1e-2, *, max_grad_norm: float | None = None,
                 overlap: str | None = None, non_finite: str = "raise",
                 dump_folder: str | os.PathLike[str] = "non-finite") -> None:
        _check_options(dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        if max_grad_norm is not None and not (_is_number(max_grad_norm) and max_grad_norm > 0):
            raise MegacompileError(f"max_grad_norm={max_grad_norm!r} is out of range: give a number above 0, or None")
        if overlap not in (None, "backward"):
            raise MegacompileError(f"overlap={overlap!r} must be None (update beside the next forward) or 'backward' (as "
                                   "gradients arrive)")
        if overlap is not None and max_grad_norm is not None:
            raise MegacompileError("overlap='backward' updates before the global norm is known: leave max_grad_norm out")
        self.non_finite = NonFinite(non_finite, Path(dump_folder))
        self.max_grad_norm, self.overlap = max_grad_norm, overlap
        self._update: Update | None = None
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.state = OptimizerState(self.state)
        for streamed in self._models():
            streamed.arrival.attach(self if overlap is not None else None)
        native.library()  # built now, if it must be: at the first update all lanes would wait for the C++ compiler

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_options(param_group)
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self._make_state(parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("an optimizer of a streamed model can be neither pickled nor copied: its state is its model's "
                               "memory; use state_dict() or a CheckpointWriter")

    def _owner(self, parameter: Tensor) -> tuple[Streamed, str]:
        owner, name = _OWNERS.get(parameter, (None, ""))
        streamed = owner() if owner is not None else None
        if streamed is None:
            raise MegacompileError(
                f"a parameter of shape {list(parameter.shape)} belongs to no streamed model: call model = "
                "megacompile.stream(model) before making the optimizer, and make a new optimizer after close()")
        return streamed, name

    @property
    def streamed(self) -> Streamed:
        """The streamed model whose parameters these are."""
        models = self._models()
        if len(models) != 1:
            raise MegacompileError("an optimizer updates one streamed model: make one optimizer for each")
        return models[0]

    def _models(self) -> list[Streamed]:
        return list({id(s): s for group in self.param_groups for p in group["params"] for s, _ in (self._owner(p),)}.values())

    def _make_state(self, parameter: Tensor) -> None:
        """State tensors are views of the tile's own memory."""
        streamed, name = self._owner(parameter)
        if name not in streamed.tiling.position:  # no call reads it
            return
        tile_name, position = streamed.tiling.position[name]
        tile = streamed.store.tiles[tile_name]
        part = tile.layout.slices[position]
        if not part.trainable:
            return
        streamed.residency.leave()
        tile.allocate_moments()
        assert tile.m is not None and tile.v is not None
        state = self.state[parameter]
        state["step"] = 0
        state["exp_avg"] = tile.m[part.start:part.stop].view(part.shape)
        state["exp_avg_sq"] = tile.v[part.start:part.stop].view(part.shape)
        if tile.moments_written:  # by an optimizer before this one
            streamed.store.preserve(tile_name)
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
        if tile.remainder is not None:
            state["remainder"] = tile.remainder[part.start:part.stop].view(part.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Hands the update to the lanes. Parameters without `.grad` are left alone. Raises what an earlier update failed
        with (`LaneError`); called again, it completes that update: the tiles that are missing, from the gradients that it
        had (setting `.grad` to None since does no harm), with the hyper-parameters that it had.

        After a backward that has updated (`overlap`), and after `train_step`, nothing is left to do. A `closure` is called
        first, beside the update before, as the plain loop runs its forward and backward; its loss is returned."""
        streamed = self.streamed
        streamed.arrival.check_step(self)
        loss = None
        if closure is not None:
            if self._completes():
                return None
            streamed.check_whole()
            with torch.enable_grad():
                loss = closure()
        if streamed.arrival.end() or self._ended():
            streamed.raise_pending()
            streamed.check_whole()
            return loss
        streamed.settle()
        if self._completes():
            return loss
        streamed.check_whole()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return loss
        if unread := [name for name in (self._owner(p)[1] for p in trained) if name not in streamed.tiling.position]:
            raise UnsupportedError(f"{unread[0]} has a gradient, and the streamed forward does not read it: give it to an "
                                   "optimizer of torch.optim")
        streamed.check_trained()
        streamed.adopt_writes()
        if streamed.writes.refresh_norms(streamed.gradients):
            streamed.residency.gradients_current = False
        self._update = self._request(lambda parameter: parameter.grad is not None)
        streamed.update(self._update)
        return loss

    def _completes(self) -> bool:
        """Completes an update of ours that has failed; whether there was one, with its gradients as they were."""
        return self._update is not None and self._update is self.streamed.unfinished and self.streamed.complete()

    def _ended(self) -> bool:
        """Whether the update in flight is the one that is asked for: it is ours, and no gradient has come since."""
        update = self.streamed.updating
        return update is not None and update is self._update and all(
            p.grad is None for group in self.param_groups for p in group["params"])

    def request(self) -> Update:
        """An update of every parameter, for a step that runs as one program or for a backward that updates."""
        self.streamed.raise_pending()
        self.streamed.check_whole()
        self.streamed.adopt_writes()
        self._update = self._request(lambda parameter: True)
        return self._update

    def _request(self, wanted: Callable[[Tensor], bool]) -> Update:
        """What the lanes need to know of a step: hyper-parameters as they are now, of the parameters that are wanted."""
        streamed = self.streamed
        segments: dict[str, list[AdamSegment]] = {}
        counted: dict[str, list[int]] = {}
        states: list[dict[str, Any]] = []
        with counting:
            before = self._update if self._update is not None and self._update.open else None
            for group, parameter in ((g, p) for g in self.param_groups for p in g["params"] if wanted(p) and self.state[p]):
                _, name = self._owner(parameter)
                state = self.state[parameter]
                for tile, position in streamed.tiling.places[name]:
                    part = streamed.tiling.layouts[tile].at_home(position)
                    segments.setdefault(tile, []).append(AdamSegment(
                        part.start, part.stop, float(group["lr"]), group["betas"][0], group["betas"][1], group["eps"],
                        group["weight_decay"], int(state["step"]) + 1))
                    counted.setdefault(tile, []).append(position)
                states.append(state)
        for each in segments.values():
            each.sort(key=lambda s: s.start)
        for positions in counted.values():
            positions.sort()
        return Update(segments, counted, self.max_grad_norm, on_arrival=self.overlap is not None, states=states, before=before,
                      report=functools.partial(self.non_finite.report, streamed.skipped, streamed.kept))

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the last step's gradients before clipping; waits for it. None before the first step."""
        if self._update is None:
            return None
        if self._update.norm is None:
            self.streamed.settle()
        return self._update.norm

    def norm_of_last_step(self) -> Callable[[], float | None]:
        """Gives `grad_norm` of the last step later, when others may have followed, and without a wait: None until its update
        has begun. When the loss of the next step is known, so is this."""
        update = self._update
        return lambda: None if update is None else update.norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.streamed.settle()  # the update in flight reads them
            self.streamed.check_whole()  # and one that stopped half-way needs them yet
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Moments and remainders are views of the tiles, as those of `torch.optim` are of its own: save or copy them before
        the next step. Works after `close()` too."""
        for owner in {_OWNERS[p][0] for group in self.param_groups for p in group["params"] if p in _OWNERS}:
            if (streamed := owner()) is not None:
                streamed.residency.bring_home()
                streamed.check_whole()
                streamed.adopt_writes()  # a remainder is of the weight that was there before
        saved = super().state_dict()
        saved["state"] = {index: dict(state) for index, state in saved["state"].items()}  # of types that are unpickled
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies moments and remainders into the tiles, exactly: the base class would cast them to the parameter's dtype.
        Load the model first: a remainder belongs to the weight that it was saved with, and loading a weight clears it.

        As in `torch.optim`, a parameter without a saved state starts anew.

        Raises, before anything has changed, `MegacompileError` for another number of groups, parameters, or another shape,
        and for options as the constructor does."""
        streamed = self.streamed
        streamed.residency.leave()
        groups = state_dict["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise MegacompileError("the saved optimizer has other parameter groups: make it with the groups it was saved with")
        states = [(parameter, state_dict["state"].get(index, {}))
                  for saved, group in zip(groups, self.param_groups, strict=True)
                  for index, parameter in zip(saved["params"], group["params"], strict=True)]
        for group in groups:
            _check_options(group)
        for parameter, saved in states:
            self._check_state(parameter, saved)
        streamed.adopt_writes()  # sets remainders to zero, before the saved ones are loaded
        self._update = None
        streamed.arrival.end()
        streamed.store.preserve()
        for saved, group in zip(groups, self.param_groups, strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        for parameter, saved in states:
            self._load_state(parameter, saved)

    def _check_state(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """Raises what `load_state_dict` raises for the saved state of one parameter; a remainder may be missing."""
        for key, value in self.state[parameter].items() if saved else ():
            if key not in saved and key == "remainder":
                continue
            if key not in saved or (isinstance(value, Tensor) and value.shape != getattr(saved[key], "shape", None)):
                raise MegacompileError(f"the saved optimizer state has no {key} of shape {list(parameter.shape)}: load one "
                                       "that was saved with this model")
            if key == "remainder" and saved[key].dtype != torch.int16:
                raise UnsupportedError("the saved remainder is not int16: it was cast on the way; save it unchanged")

    def _load_state(self, parameter: Tensor, saved: Mapping[str, Any]) -> None:
        """Copies a saved state that was checked; what it does not have becomes zero."""
        state = self.state[parameter]
        if not state:
            return
        streamed, name = self._owner(parameter)
        tile = streamed.store.tiles[streamed.tiling.position[name][0]]
        for key, value in state.items():
            if not isinstance(value, Tensor):
                state[key] = int(saved.get(key, 0))
            elif key in saved:
                value.copy_(saved[key])
            elif key == "remainder" or tile.moments_written:
                value.zero_()
        tile.moments_written |= bool(saved)

    def named_groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Each parameter group: its options, and the names that its parameters have in the model."""
        return [({k: v for k, v in group.items() if k not in ("params", "param_names")},
                 [self._owner(parameter)[1] for parameter in group["params"]]) for group in self.param_groups]

    def master(self, parameter: Tensor) -> Tensor:
        """A copy of a parameter's FP32 master weight, of its shape."""
        self.streamed.residency.bring_home()
        self.streamed.adopt_writes()
        remainder = self.state[parameter].get("remainder")
        if remainder is None:
            return parameter.detach().float().clone()
        return join_fp32(parameter.detach().flatten(), remainder.flatten()).view(parameter.shape)

    @torch.no_grad()
    def set_master(self, parameter: Tensor, master: Tensor) -> None:
        """Sets a parameter from an FP32 master, remainder and all."""
        streamed = self.streamed
        streamed.residency.leave()
        streamed.store.preserve()
        remainder = self.state[parameter].get("remainder")
        if remainder is None:
            parameter.copy_(master)
            return
        high, low = split_fp32(master.detach().float().contiguous().flatten())
        parameter.copy_(high.view(parameter.shape))
        streamed.adopt_writes()
        remainder.copy_(low.view(parameter.shape))
