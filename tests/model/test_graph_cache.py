"""Differentiated graphs that are kept on disk: a second capture of the same model has the same templates without AOT, and
nothing is kept whose text does not say what it computes."""
from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny_models
import torch
from torch import Tensor, fx, nn
from transformers import AutoModelForCausalLM, GptOssConfig, Mamba2Config

import megacompile
from megacompile import api
from megacompile.codegen import cache as sealed_cache
from megacompile.compat.symbols import ShapeEnv, known_of
from megacompile.frontend.capture import CapturedModel, capture
from megacompile.frontend.templates import build, graph_cache, joint
from megacompile.ir.plan import PLAIN, CaptureKey

SMALL: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                             use_cache=False)
PACKED = CaptureKey(("position_ids",))


def experts() -> Any:
    return AutoModelForCausalLM.from_config(GptOssConfig(
        **SMALL, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=8))


def state_space() -> Any:
    return AutoModelForCausalLM.from_config(Mamba2Config(
        **SMALL, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8, expand=2))


class Scale(torch.autograd.Function):
    """A function with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


class Own(nn.Module):
    """A model whose layers apply a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Layer(function) for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(16, 16), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(x))


@torch.compiler.allow_in_graph
def opaque(x: Tensor) -> Tensor:
    return torch.tanh(x)


def doubled(x: Tensor) -> Tensor:
    return x * torch.tensor([2.0] * 16)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of graphs in an empty cache."""
    monkeypatch.setenv("MEGACOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sealed_cache, "_key", lambda: bytes(range(32)))
    return tmp_path / "cache" / "graphs"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that AOT has made."""
    found: list[fx.GraphModule] = []
    real = graph_cache.aot_export_joint_simple

    def export(*arguments: Any, **options: Any) -> Any:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(graph_cache, "aot_export_joint_simple", export)
    for name in ("joint_graph", "forward_graph"):  # tests share these otherwise
        monkeypatch.setattr(build, name, getattr(joint, name))
    monkeypatch.setattr(api, "capture", capture)
    return found


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """A test that expects no warning gets none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def described(captured: CapturedModel) -> list[str]:
    """Every variant of every template: its code, what each value looks like, and which of them are results."""
    def value(each: Any) -> Any:
        if isinstance(each, list | tuple):
            return [value(one) for one in each]
        return (str(each.dtype), tuple(map(str, each.shape)), tuple(map(str, each.stride())), each.requires_grad
                ) if isinstance(each, Tensor) else str(each)

    lines = []
    for name, template in captured.templates.items():
        variants = [template.variant(each) for each in template.variant_names]
        lines += [name, template.digest, str(template.stages), str(template.residual_bytes("attention"))]
        lines += [f"{node.name} {value(node.meta['val'])} {node.meta.get('stack_trace')}"
                  for variant in variants for node in variant.graph.graph.nodes if "val" in node.meta]
    return [*lines, str(captured.conditions), str(captured.calls)]


@pytest.mark.parametrize(("model", "key"), [
    pytest.param(lambda: Own(torch.tanh), PLAIN, id="own, plain"),
    pytest.param(tiny_models.build, PACKED, id="dense, packed", marks=pytest.mark.nightly),
    pytest.param(experts, PACKED, id="experts, packed", marks=pytest.mark.nightly),
    pytest.param(tiny_models.build, PLAIN, id="dense, plain", marks=pytest.mark.nightly),
    pytest.param(state_space, PLAIN, id="state space, plain", marks=pytest.mark.nightly),
    pytest.param(experts, PLAIN, id="experts, plain", marks=pytest.mark.nightly),
    pytest.param(state_space, PACKED, id="state space, packed", marks=pytest.mark.nightly)])
def test_a_second_capture_has_the_same_templates_and_differentiates_nothing(
        model: Callable[[], Any], key: CaptureKey, made: list[fx.GraphModule]) -> None:
    first = described(capture(model(), key=key))
    count = len(made)
    assert count > 2 and described(capture(model(), key=key)) == first
    assert len(made) == count


@pytest.mark.parametrize("make", [lambda: Own(Scale.apply), pytest.param(experts, marks=pytest.mark.nightly)],
                         ids=["own", "experts"])
def test_training_from_kept_graphs_has_the_same_bits(make: Callable[[], Any], made: list[fx.GraphModule]) -> None:
    results, counts = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = megacompile.stream(make(), device="cpu", compile=False)
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2)
        batch = tiny_models.batch(3, rows=3, length=12)
        losses = [model.megacompile.train_step(batch, optimizer) for _ in range(3)]
        model.megacompile.close()
        results.append([*losses, *model.state_dict().values()])
        counts.append(len(made))
    assert counts[0] == counts[1] > 2
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.nightly(held_by="tests/model/test_graph_cache.py::test_training_from_kept_graphs_has_the_same_bits")
def test_a_function_with_a_derivative_of_its_own_is_kept(made: list[fx.GraphModule]) -> None:
    first = described(capture(Own(Scale.apply)))
    count = len(made)
    assert described(capture(Own(Scale.apply))) == first and len(made) == count
    assert described(capture(Own(torch.tanh))) != first and len(made) > count


def test_a_graph_that_calls_what_is_not_in_it_is_not_kept(made: list[fx.GraphModule], cache: Path) -> None:
    """The function's code may be another one at the next start."""
    capture(Own(opaque))
    others = len(list(cache.iterdir()))
    count = len(made)
    capture(Own(opaque))
    assert len(made) == 2 * count - others < 2 * count, "its layers are differentiated again, and nothing else"


def test_a_graph_with_constants_is_not_kept(made: list[fx.GraphModule]) -> None:
    """Its values are not written with it."""
    first = described(capture(Own(doubled)))
    count = len(made)
    assert described(capture(Own(doubled))) == first and len(made) > count


@pytest.mark.parametrize("make", [lambda: Own(Scale.apply), pytest.param(experts, marks=pytest.mark.nightly)],
                         ids=["own", "experts"])
def test_a_file_names_no_module_of_the_user(make: Callable[[], Any], cache: Path) -> None:
    """Reading it would import that module."""
    capture(make())
    Modules.found.clear()
    for path in cache.iterdir():
        Modules(io.BytesIO(path.read_bytes()[:-32])).load()
    packages = {module.partition(".")[0] for module in Modules.found}
    assert "torch" in packages and packages <= {"torch", "sympy", "megacompile", "collections", "builtins", "dill"}


class Anything(list[Any]):
    """Stands for whatever a pickle makes."""

    def __new__(cls, *_: Any, **__: Any) -> Anything:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, _: Any) -> None:
        pass

    def __setitem__(self, *_: Any) -> None:
        pass

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)


class Modules(pickle.Unpickler):
    """Notes the modules that a pickle names, and imports none."""

    found: ClassVar[set[str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add(module)
        return Anything

    def persistent_load(self, _: Any) -> Any:
        return Anything()


def test_a_changed_graph_is_made_again_with_a_warning(made: list[fx.GraphModule], cache: Path) -> None:
    first = described(capture(Own(torch.tanh)))
    count = len(made)
    for path in cache.iterdir():
        *kept, last = path.read_bytes()
        path.write_bytes(bytes([*kept, last ^ 1]))
    with pytest.warns(RuntimeWarning, match="was changed since megacompile wrote it"):
        assert described(capture(Own(torch.tanh))) == first
    assert len(made) == 2 * count
    assert described(capture(Own(torch.tanh))) == first and len(made) == 2 * count


@pytest.mark.nightly(held_by="tests/model/test_graph_cache.py::test_a_changed_graph_is_made_again_with_a_warning")
def test_without_a_folder_every_capture_differentiates(made: list[fx.GraphModule], cache: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.write_text("a file")
    capture(Own(torch.tanh))
    count = len(made)
    capture(Own(torch.tanh))
    assert len(made) == 2 * count


def test_the_question_names_everything_that_changes_the_answer() -> None:
    fakes = graph_cache.FakeTensorMode(shape_env=ShapeEnv())

    def asked(shape: tuple[int, ...] = (3, 4), *, gradient: bool = True, dtype: torch.dtype = torch.float32, by: float = 2.0,
              joint: bool = True, transposed: bool = False, twice: bool = False) -> str | None:
        graph = fx.Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        graph.output((graph.call_function(torch.add, (x, y), {"alpha": by}),))
        with fakes:
            one = torch.zeros(shape, dtype=dtype, requires_grad=gradient)
            other = one if twice else torch.zeros(shape[::-1]).t() if transposed else torch.zeros(shape)
        return graph_cache._question(fx.GraphModule({}, graph), [one, other], known_of(fakes.shape_env), joint, {})

    usual = asked()
    assert usual is not None and asked() == usual
    others = [asked((3, 5)), asked(gradient=False), asked(dtype=torch.float64), asked(by=3.0), asked(joint=False),
              asked(transposed=True), asked(twice=True)]
    torch.use_deterministic_algorithms(True)
    try:
        others.append(asked())
    finally:
        torch.use_deterministic_algorithms(False)
    for autocast in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", autocast):
            others.append(asked())
    assert len({usual, *others}) == len(others) + 1
