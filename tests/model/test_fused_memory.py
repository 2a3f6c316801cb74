"""The memory of fused graphs: at least what inductor's code allocates."""
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile

from megacompile.codegen.inductor import Inductor
from megacompile.predict import cost

TOKENS, WIDTH, RANK = 256, 4096, 2  # four rows of 64 tokens
#: A value of all tokens, in bytes. All other values are small.
VALUE = 4 * TOKENS * WIDTH


def products(x: Tensor, narrow: Tensor, wide: Tensor, adapters: bool) -> Tensor:
    """A linear layer [rows, length, width], with or without an adapter."""
    return x @ wide + (x @ narrow) @ wide[:RANK] * 2 if adapters else x @ wide


def feed_forward(x: Tensor, narrow: Tensor, wide: Tensor, out: Tensor, adapters: bool) -> tuple[Tensor, ...]:
    gate, up = products(x, narrow, wide, adapters), products(x + 1, narrow, wide, adapters)
    return ((torch.nn.functional.silu(gate) * up) @ out,)


def recomputed_backward(x: Tensor, narrow: Tensor, wide: Tensor, out: Tensor, adapters: bool) -> tuple[Tensor, ...]:
    """Its backward after a second forward. Each gradient is read by a layer's product and, scaled, by an adapter's."""
    gate, up = products(x, narrow, wide, adapters), products(x + 1, narrow, wide, adapters)
    grad = products(x + 2, narrow, wide, adapters)
    sigmoid = torch.sigmoid(gate)
    of_up, of_gate = grad * gate * sigmoid, grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    made = [gate * sigmoid * up, of_up, of_gate, *((of_up * 2, of_gate * 2) if adapters else ())]
    return tuple(each @ out for each in made)


def one_after_another(x: Tensor, narrow: Tensor, wide: Tensor, out: Tensor, adapters: bool) -> tuple[Tensor, ...]:
    """Values of one product, each of which is read before the next one is computed."""
    made = products(x, narrow, wide, adapters)
    return tuple((made * number) @ out for number in range(2, 6))


def allocated(run: Callable[[], Any]) -> int:
    """The most bytes that a call allocates at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(("function", "adapters", "values"), [
    (feed_forward, False, 3), (feed_forward, True, 5), (recomputed_backward, False, 6), (recomputed_backward, True, 12),
    (one_after_another, False, 5)])
def test_results_of_one_kernel_are_there_together_with_all_that_it_reads(
        function: Callable[..., Any], adapters: bool, values: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, six products become five values in one kernel. Inductor may write results over products
    that it no longer needs."""
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path))
    shapes = (4, TOKENS // 4, 8), (8, RANK), (8, WIDTH), (WIDTH, 8)
    with FakeTensorMode(shape_env=ShapeEnv()):
        fakes = [torch.empty(shape) for shape in shapes]
        graph = make_fx(functools.partial(function, adapters=adapters))(*fakes)
    planned = cost._graph_peak(graph.graph, int, fused=True)
    given = [torch.randn(shape) for shape in shapes]
    compiled = Inductor().compile(graph, fakes)
    compiled(*given)
    found = allocated(lambda: compiled(*given))
    assert found <= planned + VALUE // 2
    assert planned // VALUE == values
