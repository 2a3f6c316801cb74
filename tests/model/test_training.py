"""The training loop on plain PyTorch models: it needs nothing of a model but a loss."""
from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import megacompile
from megacompile import training
from megacompile.errors import ArgumentError, MegacompileError
from megacompile.finetuning import run_progress

CONFIG = """{"model_type": "qwen2", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
 "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}"""


class Bigrams(nn.Module):
    """Predicts a token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.table(input_ids[:, :-1])
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def cycles() -> Iterator[dict[str, torch.Tensor]]:
    tokens = torch.arange(16)[None] % 8
    while True:
        yield {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(CONFIG)
    return tmp_path / "config.json"


@pytest.mark.parametrize(("peak", "slots", "device"), [(5, 3, 5), (0, 3, 3)])
def test_memory_of_a_streamed_model_is_what_its_handle_says(peak: int, slots: int, device: int) -> None:
    handle = SimpleNamespace(stats={"peak_device_bytes": peak, "slot_bytes": slots, "host_bytes": 7})
    assert training.memory(SimpleNamespace(megacompile=handle)) == (device, 7)


def learning_rates(**options: Any) -> list[float]:
    optimizer = torch.optim.SGD(Bigrams().parameters(), lr=1.0)
    schedule, rates = training.warmup_then_decay(optimizer, steps=20, warmup=4, **options), []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("decay", [training.Decay.LINEAR, training.Decay.COSINE])
def test_the_learning_rate_rises_then_falls_to_a_tenth(decay: training.Decay) -> None:
    rates = learning_rates(decay=decay)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4] == pytest.approx(1.0) and rates[19] == rates[20] == pytest.approx(0.1)
    assert all(before > after for before, after in pairwise(rates[4:20]))


def test_the_learning_rate_falls_in_a_cosine_to_where_it_is_told_or_stays() -> None:
    rates = learning_rates(decay=training.Decay.COSINE, final=0.0)
    assert rates[9] == pytest.approx(0.5 * (1 + math.cos(math.pi / 3))) and rates[19] == pytest.approx(0.0, abs=1e-12)
    assert learning_rates(decay=training.Decay.CONSTANT)[4:] == [1.0] * 17


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_signal_asks_once_and_interrupts_the_second_time(number: signal.Signals, name: str) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with training.Interruption(said.append) as interruption:
        assert not interruption.asked
        os.kill(os.getpid(), number)
        assert interruption.signal is number and said == [f"{name}: stopping after this step (repeat to stop immediately)"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_an_evaluation_is_the_mean_over_labels_and_not_over_batches() -> None:
    model, tokens = Bigrams().train(), torch.randint(8, (3, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[1, 2:], labels[2, :4] = -100, -100
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model.table(tokens[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
    batches = [{"input_ids": tokens[part], "labels": labels[part]} for part in (slice(0, 1), slice(1, 3))]
    batches.append({"input_ids": tokens, "labels": torch.full_like(labels, -100)})  # whose mean there is not
    assert training.evaluate(model, batches) == pytest.approx(float(expected)) and model.training


def entry(number: int, **changes: Any) -> run_progress.Entry:
    step = training.Step(number, 2.5, 1e-4, 1000.0, 0.25, 0.125, 2**20, 3 * 2**30, 0.5, process_bytes=5 * 2**30)
    return run_progress.Entry(step, **{**dict(epoch=0.5, mean_loss=2.75, seconds_left=7500.0, grad_norm=0.5), **changes})


def test_a_log_file_gets_the_first_the_last_and_every_nth_line() -> None:
    out = io.StringIO()
    with run_progress.ProgressDisplay(Console(file=out, width=200), steps=7, interval=3) as display:
        for number in range(1, 8):
            display(entry(number))
            display.line(entry(number))
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/7", "step 3/7", "step 6/7", "step 7/7"]
    assert lines[0] == ("step 1/7  epoch 0.50  loss 2.5000  mean 2.7500  norm 0.5  lr 1.00e-04  1,000 tokens/s (25% padding)  "
                        "0.125 TFLOPS  device 1.00 MiB  host 3.00 GiB  process 5.00 GiB  2 h 05 min left")


def test_a_terminal_shows_the_last_step_s_loss_rate_and_memory() -> None:
    out = io.StringIO()
    with run_progress.ProgressDisplay(Console(file=out, force_terminal=True, width=160), steps=7, interval=9) as display:
        display(entry(2))
        display._progress.refresh()
    assert "loss 2.5000  mean 2.7500  1,000 tokens/s  device 1.00 MiB  process 5.00 GiB" in out.getvalue()


def test_a_run_s_course_has_epoch_mean_loss_and_time_left() -> None:
    ends = iter([100.0, 102.0, 106.0])
    course = run_progress.RunProgress(10, batch=4, rows=8, losses=[4.0], clock=lambda: next(ends))
    entries = [course(training.Step(n, loss, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0)) for n, loss in ((2, 2.0), (3, 3.0), (4, 1.0))]
    assert [each.epoch for each in entries] == [1.0, 1.5, 2.0]
    assert [each.mean_loss for each in entries] == [3.0, 3.0, 2.5]
    assert [each.seconds_left for each in entries] == [None, 14.0, 18.0]


def test_random_weights_are_drawn_once_and_do_not_depend_on_threads(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megacompile.weights import empty_models
    monkeypatch.setattr(empty_models, "BLOCK", 100)
    drawn, dispatch = [], empty_models._Blocks.__torch_dispatch__

    def counted(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn.append(args[0].numel() if function in empty_models._DRAWS else 0)
        return dispatch(mode, function, types, args, kwargs)

    monkeypatch.setattr(empty_models._Blocks, "__torch_dispatch__", counted)
    found = []
    for threads in (1, 3, 3):
        drawn.clear()
        monkeypatch.setattr(empty_models.os, "cpu_count", lambda threads=threads: threads)
        torch.manual_seed(len(found) // 2)
        model = megacompile.from_config(config, device="cpu")
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
        model.megacompile.close()
        assert sum(drawn) == sum(p.numel() for p in found[-1].values() if p.dim() > 1)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["lm_head.weight"], found[2]["lm_head.weight"])
    assert float(found[0]["lm_head.weight"].std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_model_trains_from_the_weights_drawn_in_its_tiles(config: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = megacompile.from_config(config, dtype=dtype, device="cpu")
    model.save_pretrained(tmp_path / "saved")
    native = training.load_model(tmp_path / "saved")
    assert native.dtype == dtype
    ids = torch.randint(0, native.config.vocab_size, (2, 8))
    losses = []
    for each, optimizer in ((model, megacompile.AdamW), (native, torch.optim.AdamW)):
        made = optimizer(each.parameters(), lr=1e-2)
        for _ in range(2):
            loss = each(input_ids=ids, labels=ids).loss
            loss.backward()
            made.step()
            made.zero_grad()
            losses.append(loss.item())
    model.megacompile.close()
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5 if dtype == torch.float32 else 2e-2) and losses[1] < losses[0]


def test_each_weight_is_drawn_as_transformers_initializes_it_and_tied_ones_once() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = megacompile.from_config(config, device="cpu")
    native = AutoModelForCausalLM.from_config(config)
    for (name, ours), theirs in zip(model.named_parameters(), native.parameters(), strict=True):
        spread = float(theirs.detach().std()) if theirs.numel() > 1 else 0.0
        assert float(ours.detach().std()) == pytest.approx(spread, rel=0.2), name
        assert float(ours.detach().mean()) == pytest.approx(float(theirs.detach().mean()), abs=0.3 * spread + 1e-6), name
    assert model.transformer.wte.weight is model.lm_head.weight
    model.megacompile.close()


def test_a_config_that_is_nowhere_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="'no/such/folder' is not a checkpoint folder"):
        megacompile.from_config("no/such/folder", device="cpu")


def test_a_meta_model_has_no_weights(config: Path) -> None:
    assert all(parameter.is_meta for parameter in training.load_model(config, meta=True).parameters())


@pytest.mark.parametrize("text", ["no json", "{}", '{"model_type": "t5"}'])
def test_a_model_that_is_not_a_causal_language_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MegacompileError, match=r"transformers cannot load a causal language model from .*: give"):
        training.load_model(tmp_path, meta=True)


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"hidden_act": "absent"}])
def test_a_config_that_breaks_transformers_is_refused_with_what_it_raised(config: Path, change: dict[str, Any]) -> None:
    config.write_text(json.dumps(json.loads(CONFIG) | change))
    with pytest.raises(MegacompileError, match=r"transformers cannot load a causal language model from .*\n\w+Error: "):
        training.load_model(config, meta=True)


def test_cut_off_weights_are_refused(config: Path) -> None:
    (config.parent / "model.safetensors").write_bytes(b"no weights here")
    with pytest.raises(MegacompileError, match="transformers cannot load a causal language model from"):
        training.load_model(config.parent)
