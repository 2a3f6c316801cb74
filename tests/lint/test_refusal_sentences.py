"""A test triggers every sentence that refuses something; this file triggers those that no other file does."""
from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import engine
import pytest
import torch
from checked_phrases import Checked
from tiny_models import batch
from torch import Tensor, nn

import megacompile
from megacompile.errors import CaptureError, MegacompileError, UnsupportedError
from megacompile.frontend import capture
from megacompile.frontend.templates.variants import compile_variant
from megacompile.ir.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {
    "ArgumentError", "CaptureError", "DeviceMemoryError", "DeviceUnavailableError", "InsufficientMemoryError", "LeaseError",
    "MegacompileError", "RankError", "TornError", "UnsupportedError"}
#: Packages that a loop of the user's own does not reach.
APART = ("finetuning",)
_AGAIN = "the model is then captured with attention of its own"
#: Words of sentences that no user meets, with the reason.
UNMET = {
    "an attention mask that is neither": _AGAIN, "a padding mask reached a": _AGAIN, "attention dropout": _AGAIN,
    "attention argument": _AGAIN, "does not pass sliding_window=": _AGAIN, "capped scores have": _AGAIN,
    "holds a constant tensor": "Dynamo makes such tensors inputs of the graph, which are refused before",
}


def sentences() -> Iterator[tuple[str, list[str]]]:
    """Where a refusal is made, and the constant parts of what it says; those that another object says are left out."""
    for path in (path for folder in ("megacompile", "passes", "runtime") for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args
                    and path.parent.name not in APART):
                parts = [c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
                if any(len(part.split()) > 2 for part in parts):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", parts


def test_every_refusal_stands_in_a_test() -> None:
    """Three of its words in a row, in a text that a test compares with what it was told. To fix: trigger the refusal as a user
    would, and match what it says."""
    checked = "\n".join(Checked(sorted((ROOT / "tests").rglob("*.py"))).texts).replace("\\", "")  # without escapes
    missing = []
    for place, parts in sentences():
        words = [part.split() for part in parts]
        triples = [" ".join(each[i:i + 3]) for each in words for i in range(len(each) - 2)]
        if not any(triple in checked for triple in triples) and not any(start in " ".join(parts) for start in UNMET):
            missing.append(f"{place}: {' ... '.join(parts)}")
    assert not missing, "\n".join(missing)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class LossAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class ReturnsText(LossAlone):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return {"loss": super().forward(input_ids, labels), "remark": "done"}


class Weighted(LossAlone):
    """Its loss reads two arguments."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None or weights is None:
            return {"loss": None, "logits": logits}
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": (losses * weights.flatten().float()).mean(), "logits": logits}


class Result(NamedTuple):
    loss: Tensor


class ReturnsNames(LossAlone):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return Result(super().forward(input_ids, labels))


class ScoresRows(LossAlone):
    """Its logits are of rows."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits[:, 0]}


def test_an_optimizer_of_another_model_is_refused(model: Any, tmp_path: Path) -> None:
    other = megacompile.stream(LossAlone(), device="cpu")
    optimizer = megacompile.AdamW(other.parameters())
    for use in (lambda: model.megacompile.train_step(batch(1), optimizer),
                lambda: megacompile.save_checkpoint(tmp_path, model, optimizer)):
        with pytest.raises(MegacompileError, match="the optimizer belongs to another model"):
            use()
    other.megacompile.close()


def test_a_model_that_has_not_run_has_no_program() -> None:
    model = megacompile.stream(LossAlone(), device="cpu")
    with pytest.raises(MegacompileError, match="nothing has been compiled yet: pass a batch, or run one"):
        model.megacompile.compiled()
    model.megacompile.close()


def test_an_unknown_mode_of_compilation_is_refused(model: Any) -> None:
    variant = next(iter(engine.templates(model).values())).variant("forward")
    with pytest.raises(UnsupportedError, match='mode must be "eager" or "inductor", not "fast"'):
        compile_variant(variant, [], "fast")


class LastLogits(LossAlone):
    """Without labels, it returns logits of the last position only."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x if labels is not None else x[:, -1:])
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_logits_that_only_exist_without_labels_are_refused() -> None:
    model = megacompile.stream(LastLogits(), device="cpu")
    with torch.no_grad(), pytest.raises(UnsupportedError, match="the model computes other logits than with them"):
        model(torch.ones(2, 4, dtype=torch.int64))
    model.megacompile.close()


class HoldsALock(LossAlone):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(("make", "kind", "message"), [
    (ReturnsText, UnsupportedError, "ReturnsText returns remark=str: return loss and logits only"),
    (HoldsALock, CaptureError, r"HoldsALock cannot be copied \(.*\): keep tensors as parameters or buffers"),
    (ReturnsNames, UnsupportedError, "ReturnsNames returns a Result: return a tensor, tuple or ModelOutput"),
])
def test_a_model_that_cannot_be_captured_is_refused(make: Callable[[], nn.Module], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        capture(make())


def test_what_a_model_without_logits_cannot_do_is_refused() -> None:
    ids = torch.ones(2, 4, dtype=torch.int32)
    model = megacompile.stream(LossAlone(), device="cpu", example={"input_ids": ids, "labels": ids.long()})
    with pytest.raises(UnsupportedError, match="the model returns only its loss: let its forward return logits"):
        engine.captured(model).require_heads()
    with pytest.raises(UnsupportedError, match=r"input_ids is torch\.int64, which torch\.int32 does not hold: cast it to"):
        model(ids.long(), ids.long())
    model.megacompile.close()


def test_a_loss_of_tokens_for_a_model_without_logits_is_refused() -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="LossAlone must return logits for loss=, and a loss field if it returns a"):
        megacompile.stream(LossAlone(), device="cpu", loss=megacompile.losses.log_probabilities,
                           example={"input_ids": ids, "labels": ids, "targets": ids})


def test_a_batch_with_a_part_of_what_the_loss_reads_is_refused() -> None:
    ids = torch.ones(2, 4, dtype=torch.int64)
    model = megacompile.stream(Weighted(), device="cpu", example={"input_ids": ids, "labels": ids, "weights": ids})
    with pytest.raises(UnsupportedError, match="the loss needs all of labels, weights: pass all of them, or none"):
        model(input_ids=ids, labels=ids)
    model.megacompile.close()


def test_a_function_of_tokens_of_a_model_without_any_is_refused() -> None:
    model = megacompile.stream(ScoresRows(), device="cpu")
    with pytest.raises(UnsupportedError, match=r"functions of tokens need logits of \[batch, length, vocabulary\]; the"):
        model.megacompile.per_token(lambda logits: logits.logsumexp(-1), {"input_ids": torch.ones(2, 4, dtype=torch.int64)})
    model.megacompile.close()


USES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "per_token of a list": (
        lambda m: m.megacompile.per_token(torch.logsumexp, [1]), "per_token takes the model's arguments by name, .*not a list"),
    "per_token of last positions": (
        lambda m: m.megacompile.per_token(torch.logsumexp, {"input_ids": batch(1)["input_ids"], "logits_to_keep": 1}),
        "per_token returns values for all positions: leave logits_to_keep and output_hidden_states out of the batch"),
    "an update at no known time": (
        lambda m: megacompile.schedule(LossAlone(), batch=2, length=4, update="never"),
        "update must be 'step' or 'arrival', not 'never'"),
    "more waves than micro-batches": (
        lambda m: Plan(batch=2, length=4, micro_batches=(2,), waves=2), "micro-batches cannot go in 2 waves: plan fewer waves"),
    "a dtype": (
        lambda m: megacompile.stream(LossAlone(), dtype=torch.float16),
        r"dtype must be torch\.float32, torch\.bfloat16 or 'auto', not torch\.float16"),
    "a device": (lambda m: megacompile.stream(LossAlone(), device="tpu"), "device must be 'cpu' or 'cuda', not 'tpu'"),
    "an update beside an unknown pass": (
        lambda m: megacompile.AdamW(m.parameters(), overlap="forward"),
        "overlap='forward' is out of range: give update='step'"),
    "a second derivative": (
        lambda m: m(**batch(1)).loss.backward(create_graph=True), r"create_graph=True \(double backward\) is not supported"),
}


@pytest.mark.filterwarnings("ignore:Using backward")  # torch's own advice against create_graph
@pytest.mark.parametrize("what", USES)
def test_a_use_that_is_not_supported_is_refused(model: Any, what: str) -> None:
    use, message = USES[what]
    with pytest.raises(MegacompileError, match=message):
        use(model)


def test_a_model_that_one_thread_runs_has_no_lanes_to_record() -> None:
    model = megacompile.stream(LossAlone(), device="cpu", reference=True)
    with pytest.raises(MegacompileError, match="so no lanes exist to record: leave reference out"), model.megacompile.record():
        pass
    model.megacompile.close()


def test_a_buffer_of_another_shape_is_refused(model: Any) -> None:
    owner, name = next((module, name) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)
                       if buffer.dim())
    before = getattr(owner, name)
    setattr(owner, name, before.repeat(2))
    try:
        with pytest.raises(UnsupportedError, match=r"has another shape or dtype since stream\(\): close\(\) the model"):
            model(**batch(1))
    finally:
        setattr(owner, name, before)


def test_a_save_between_a_backward_that_updates_and_its_step_is_refused(tmp_path: Path) -> None:
    model = megacompile.stream(LossAlone(), device="cpu")
    optimizer = megacompile.AdamW(model.parameters(), overlap="backward")
    ids = torch.ones(2, 4, dtype=torch.int64)
    model(ids, ids).backward()
    with pytest.raises(MegacompileError, match=r"its step has not ended: save after optimizer\.step\(\)"):
        megacompile.save_checkpoint(tmp_path / "run", model, optimizer)
    optimizer.step()
    model.megacompile.close()
