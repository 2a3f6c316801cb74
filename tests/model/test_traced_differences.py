"""What tells layers and modes apart in a trace: slices, where None stands, and which tensor each layer reads."""
from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import assert_same_gradients, batch
from torch import Tensor, nn
from torch.nn import functional as F

import megacompile
from megacompile.errors import CaptureError, InsufficientMemoryError, MegacompileError, UnsupportedError

WIDTH = 16


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.norm, self.up = number, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Decoder(nn.Module):
    """`layer`: the class of its layers. Subclasses change how they run."""

    layer: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(tiny_models.VOCABULARY, WIDTH), nn.Linear(WIDTH, tiny_models.VOCABULARY)
        self.layers = nn.ModuleList(self.layer(number) for number in range(4))
        self.register_buffer("scales", torch.rand(4 * WIDTH))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scales)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.run(self.table(input_ids))).flatten(0, 1), labels.flatten())


class OwnSlice(Layer):
    """Each layer reads another part of a table."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        return super().forward(x * given[0][self.number * WIDTH:(self.number + 1) * WIDTH])


class SliceOfMode(Layer):
    """Training and evaluation differ in which end of a slice is open."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        part = given[0][:WIDTH] if self.training else given[0][-WIDTH:]
        return super().forward(x * part)


class AxisOfMode(Layer):
    """Training and evaluation differ in where None stands."""

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        table = given[0].view(4, WIDTH)[:, :4]
        pairs = table[:, None] if self.training else table[None]
        return super().forward(x + (pairs - table)[0].sum())


class ComplexConstant(Layer):
    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        turned = torch.view_as_complex(x.reshape(*x.shape[:-1], WIDTH // 2, 2)) * 1j
        return super().forward(torch.view_as_real(turned).flatten(-2))


class Sliced(Decoder):
    layer = OwnSlice


class ModeSliced(Decoder):
    layer = SliceOfMode


class ModeAxis(Decoder):
    layer = AxisOfMode


class Turned(Decoder):
    layer = ComplexConstant


class Neighbours(Decoder):
    """Each layer also reads a weight of the layer before it."""

    class layer(Layer):  # noqa: N801  (the attribute that `Decoder` reads)
        before: tuple[Layer, ...] = ()

        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            return super().forward(x + (F.linear(x, self.before[0].up.weight) if self.before else x))

    def __init__(self) -> None:
        super().__init__()
        for before, layer in zip(self.layers[1:], self.layers[2:], strict=False):
            layer.before = (before,)
        self.layers[1].before = (self.layers[0],)


class ReadBefore(Decoder):
    """The model reads each layer's buffer, which is registered in both, before any layer runs."""

    class layer(Layer):  # noqa: N801
        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            return super().forward(x * self.shift)

    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            self.register_buffer(f"shift{number}", torch.rand(WIDTH) + number)
            layer.register_buffer("shift", getattr(self, f"shift{number}"))

    def run(self, x: Tensor) -> Tensor:
        return super().run(x + self.shift0 + self.shift1 * self.shift2 - self.shift3)


class EmptyParameter(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))

    def run(self, x: Tensor) -> Tensor:
        return super().run(x + self.nothing.sum())


class Strided(Decoder):
    """Reads a weight of each layer with strides of its own."""

    class layer(Layer):  # noqa: N801
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.wide = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH))

        def forward(self, x: Tensor, *given: Tensor) -> Tensor:
            return super().forward(F.linear(x, self.wide[:, WIDTH:].t().as_strided((WIDTH, WIDTH), (1, WIDTH), 3)))


@pytest.mark.parametrize("kind", [
    Sliced, *(pytest.param(each, marks=pytest.mark.nightly) for each in (
        ModeSliced, ModeAxis, Turned, Neighbours, ReadBefore, EmptyParameter, Strided))],
                         ids=lambda kind: kind.__name__)
def test_layers_and_modes_that_differ_in_little_are_told_apart(kind: type[Decoder]) -> None:
    native, given = kind(), batch(0)
    model = megacompile.stream(kind(), layers="layers", device="cpu", micro_batch_size=2)
    losses = [each(**given) for each in (model, native)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert_same_gradients(model, native)
    with torch.no_grad():
        evaluated = [each.eval()(**given).item() for each in (model, native)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-6)
    model.megacompile.close()


class ChangedBetween(Decoder):
    def run(self, x: Tensor) -> Tensor:
        shared = self.scales[:WIDTH] * 1
        for layer in self.layers:
            x = layer(x + shared)
            shared.add_(1)
        return x


class UnderAutocast(Decoder):
    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().run(x)


@pytest.mark.parametrize(("kind", "message"), [
    (ChangedBetween, "changes a value in place between layers that an earlier layer has read: make a new value instead"),
    (UnderAutocast, r"runs its layers under torch\.autocast, .*: use autocast within the layers, or convert")],
    ids=["changed between layers", "autocast around layers"])
def test_what_layers_apart_would_not_see_is_refused(kind: type[Decoder], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        megacompile.stream(kind(), layers="layers", device="cpu")


@pytest.mark.nightly(held_by="tests/model/test_traced_differences.py::test_what_layers_apart_would_not_see_is_refused")
@pytest.mark.parametrize("which", range(4))
def test_strides_into_a_parameter_that_is_not_contiguous_are_refused(which: int) -> None:
    model = Strided()
    layer: Any = model.layers[which]
    layer.wide = nn.Parameter(layer.wide.detach().t().contiguous().t())
    said = rf"layers\.{which} .* reads a parameter that is not contiguous with as_strided: make the parameter contiguous"
    with pytest.raises(UnsupportedError, match=said):
        megacompile.stream(model, layers="layers", device="cpu")


def test_the_processes_of_a_schedule_count_in_what_the_host_lacks() -> None:
    with pytest.raises(InsufficientMemoryError, match=r"and 128\.00 GiB for 128 processes\) and 100\.00 GiB are available"):
        megacompile.schedule(Decoder(), batch=1, length=8, layers="layers", device="cpu", host_memory="100GiB", gpus=128,
                             example=batch(0))


def test_deferred_moments_with_updates_on_arrival_are_refused() -> None:
    options: dict[str, Any] = dict(batch=2, length=8, layers="layers", device="cpu", example=batch(0), update="arrival")
    with pytest.raises(MegacompileError, match="deferred_moments=True is for updates at the end of a step: leave it out"):
        megacompile.schedule(Decoder(), deferred_moments=True, **options)
