"""Edited programs: a safe edit runs and changes no bit, an unsafe one is refused with the reason, and both can be undone."""
from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine
import pytest
import tiny_models
import torch
from counted import python_calls

import megacompile
from megacompile.errors import HazardError, InsufficientMemoryError, MegacompileError, ProgramError
from megacompile.ir.plan import BatchSpec
from megacompile.ir.text import parse_with_plan

SPEC = BatchSpec(3, 9, labels=True, training=True)


shared = tiny_models.shared_in_module(checkpoint_interval=1, micro_batch_size=2)


@pytest.fixture
def streamed(shared: tiny_models.Shared) -> Iterator[Any]:
    model = shared.fresh()
    yield model
    engine.executables(model).drop(None)


def text_of(model: Any) -> str:
    return model.megacompile.text(tiny_models.batch())


def edit(text: str, *changes: tuple[str, str], section: str = "forward") -> str:
    """Replaces in one section ("" for the declarations), each pattern exactly once."""
    start = text.index(f"def {section}(p)") if section else 0
    end = text.find("\ndef ", start + 1)
    head, body, tail = text[:start], text[start:end], text[end:]
    body = "\n".join(line.split("  #")[0].rstrip() for line in body.splitlines()) + "\n"
    for old, new in changes:
        assert body.count(old) == 1, f"{old!r} stands {body.count(old)} times in {section}"
        body = body.replace(old, new)
    return head + body + tail


ARRIVAL = ('    p.wait("h2d", e_11)\n    p.wait("h2d", e_12)\n'
           '    w4 = p.prefetch("epilogue", into="WB0")\n    e_18 = p.record(w4)\n')
EARLIER = (ARRIVAL, ""), ("    p.release(w0)\n", "    p.release(w0)\n" + ARRIVAL)


def prefetch_moved_earlier(text: str) -> str:
    return edit(text, *EARLIER, ("    p.release(w0)\n", '    x = p.record(s_1)\n    p.wait("h2d", x)\n    p.release(w0)\n'))


def slot_added(text: str) -> str:
    """The third layer's weights need not wait for the first layer's slot."""
    text = edit(text, ('program.slot("WB0"', 'program.slot("W2", bytes=8960)\nprogram.slot("WB0"'), section="")
    return edit(
        text, ('    p.wait("h2d", e_9)\n    p.wait("h2d", e_10)\n', ""),
        ('    w3 = p.prefetch("model.layers.2", into="W0")\n    e_17 = p.record(w3)\n', ""),
        ('    p.wait("h2d", e)\n', '    x = p.enter("W2", "read", "compute")\n    p.wait("h2d", e)\n'),
        ("    e_15 = p.record(w2)\n",
         '    e_15 = p.record(w2)\n    p.wait("h2d", e_9)\n    p.wait("h2d", e_10)\n    p.wait("h2d", x)\n'
         '    w3 = p.prefetch("model.layers.2", into="W2")\n    e_17 = p.record(w3)\n'),
        ('    p.leave("W0", "write", e_17)\n    p.leave("W0", "read", e_20)\n',
         '    p.leave("W0", "write", e_14)\n    p.leave("W0", "read", e_16)\n'
         '    p.leave("W2", "write", e_17)\n    p.leave("W2", "read", e_20)\n'))


def wait_moved(text: str) -> str:
    return edit(text, ('    p.wait("compute", e_15)\n', ""), ('    p.wait("compute", e_14)\n',
                                                              '    p.wait("compute", e_14)\n    p.wait("compute", e_15)\n'))


SAFE: dict[str, Callable[[str], str]] = {each.__name__: each for each in (prefetch_moved_earlier, slot_added, wait_moved)}


def loop(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps of two shapes, two forwards before their backwards, gradients that are added up, and an evaluation."""
    optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
    losses = []
    for seed in range(2):
        losses.append(tiny_models.train_step(model, optimizer, seed))
        losses.append(tiny_models.train_step(model, optimizer, seed, rows=2, length=5))
        open_losses = [model(**tiny_models.batch(seed + n)).loss for n in range(2)]
        with torch.no_grad():
            losses.append(float(model(**tiny_models.batch(seed)).loss))
        for loss in open_losses:
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, tiny_models.weights(model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("safe", SAFE)
def test_a_safe_edit_runs_and_changes_no_bit(safe: str, streamed: Any, shared: tiny_models.Shared) -> None:
    losses, weights = loop(streamed)
    edited = SAFE[safe](text_of(streamed))
    shared.fresh()
    assert streamed.megacompile.load_program(edited) == SPEC
    program = streamed.megacompile.program(tiny_models.batch())
    assert program == parse_with_plan(edited)[0]
    rng = random.Random(0)
    engine.delay(streamed, lambda lane: time.sleep(rng.choice((0, 0, 0, 0.001))))
    same_losses, same_weights = loop(streamed)
    assert same_losses == losses
    assert tiny_models.same_bits(same_weights, weights)
    assert engine.trained(streamed).loaded, "the last backward was of the edited program"


def test_an_edited_loop_that_updates_on_arrival_changes_no_bit(streamed: Any, shared: tiny_models.Shared) -> None:
    """Its text says so, and is of another shape than that of a loop that updates at its end."""
    found = []
    for edited in (False, True):
        model = shared.fresh()
        optimizer = megacompile.AdamW(model.parameters(), lr=1e-2, overlap="backward")
        if edited:
            text = prefetch_moved_earlier(text_of(model))
            assert model.megacompile.load_program(text) == replace(SPEC, update="arrival")
        losses = [tiny_models.train_step(model, optimizer, seed) for seed in range(3)]
        assert engine.trained(model).loaded == edited
        found.append((losses, tiny_models.weights(model)))
    (losses, weights), (same_losses, same_weights) = found
    assert same_losses == losses and tiny_models.same_bits(same_weights, weights)


def test_the_program_goes_back_to_what_it_was(streamed: Any) -> None:
    before = text_of(streamed)
    streamed.megacompile.load_program(slot_added(before))
    assert 'program.slot("W2"' in text_of(streamed)
    streamed.megacompile.unload_program()
    assert text_of(streamed) == before
    with pytest.raises(MegacompileError, match="no edited program is loaded"):
        streamed.megacompile.unload_program(SPEC)


def test_an_open_forward_goes_on_with_the_program_that_it_began_with(streamed: Any) -> None:
    loss = streamed(**tiny_models.batch()).loss
    streamed.megacompile.load_program(slot_added(text_of(streamed)))
    loss.backward()
    expected = {n: p.grad.clone() for n, p in streamed.named_parameters()}
    streamed.zero_grad()
    streamed(**tiny_models.batch()).loss.backward()
    assert all(torch.equal(p.grad, expected[n]) for n, p in streamed.named_parameters())


def test_a_printed_text_says_what_it_was_made_for(streamed: Any) -> None:
    program, spec, plan = parse_with_plan(text_of(streamed))
    compiled = streamed.megacompile.compiled(tiny_models.batch())
    assert (program, spec, plan) == (compiled.program, compiled.spec, compiled.plan)
    assert spec == SPEC
    evaluation = streamed.megacompile.text(tiny_models.batch(), training=False)
    assert parse_with_plan(evaluation)[1] == BatchSpec(3, 9, labels=True, training=False)
    whole = streamed.megacompile.text(tiny_models.batch(), update="arrival", whole_step=True)
    loaded = streamed.megacompile.load_program(whole)
    assert (loaded.update, loaded.whole_step) == ("arrival", True)


def test_a_file_is_read_and_one_that_is_not_there_is_named(streamed: Any, tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(wait_moved(text_of(streamed)), encoding=encoding)
        assert streamed.megacompile.load_program(path) == streamed.megacompile.load_program(str(path)) == SPEC
    with pytest.raises(MegacompileError, match=r"the program cannot be read: .*nowhere"):
        streamed.megacompile.load_program("nowhere.txt")


def test_an_unsafe_edit_is_refused_with_both_nodes_and_the_missing_order(streamed: Any) -> None:
    unsafe = edit(text_of(streamed), *EARLIER)
    with pytest.raises(HazardError) as caught:
        streamed.megacompile.load_program(unsafe)
    message = str(caught.value)
    assert "not ordered:  write of WB0 by prefetch epilogue is not ordered after read by forward prologue mb 1\n" in message
    line = next(i for i, text in enumerate(unsafe.splitlines(), 1) if "w4 = " in text)
    assert f"inserted by:  line {line} of the text" in message
    (here,) = (row for row in message.splitlines() if row.endswith("<-- ERROR HERE"))
    (other,) = (row for row in message.splitlines() if row.endswith("<-- conflicts with"))
    assert "w4 = prefetch epilogue" in here
    assert "s_1 = forward prologue mb 1" in other
    assert not streamed.megacompile.compiled(tiny_models.batch()).loaded, "nothing has changed"


REFUSED: dict[str, tuple[str, tuple[tuple[str, str], ...], str]] = {
    "a wait dropped": ("forward", (('    p.wait("h2d", e_16)\n', ""),),
                       "write of W0 by prefetch model.layers.2 is not ordered after read by forward model.layers.0 mb 1"),
    "a wait for another section dropped": (
        "forward", (('    p.wait("h2d", e_5)\n', ""),),
        "write of W0 by prefetch model.layers.0 is not ordered after read by compute in the sections before"),
    "an event handed on too early": ("forward", (('p.leave("W0", "read", e_20)', 'p.leave("W0", "read", e_16)'),),
                                     "leave W0 read e_16 is not ordered after read by forward model.layers.2 mb 1"),
    "a slot that is taken": ("forward", (('w2 = p.prefetch("model.layers.1", into="W1")',
                                           'w2 = p.prefetch("model.layers.1", into="W0")'),),
                             "write of W0 by prefetch model.layers.1 is not after the release of w1"),
    "no result": ("forward", (('    p.result("loss", values=(l_0, l_1))\n', ""),), "never handed to the caller"),
    "another op": ("evaluate", (("l_0 = p.evaluate(", "l_0 = p.outputs("),), "hands over l_0, which is of outputs"),
    "no head": ("", (('program.shape(batch=3, length=9, labels=True, training=True, lean=False, update="step", '
                      'whole_step=False, output="loss", further=(), evaluating=False, without_adapters=False, '
                      'images=1)\n', ""),),
                "a plan without a shape"),
    "another tile": ("", (('"model.layers.1", parameters=1984', '"model.layers.1", parameters=1985'),),
                     "the program is of another model: tile model.layers.1 is Tile"),
    "a tile more": ("", (('program.tile("epilogue"', 'program.tile("extra", parameters=1, weight_bytes=1, gradient_bytes=1, '
                          'trainable=False)\nprogram.tile("epilogue"'),), "of this model there is none"),
    "another call": ("", (('program.call("model.layers.1", role="layer"', 'program.call("model.layers.1", role="body"'),),
                     "call model.layers.1 is CallSpec"),
    "another batch": ("", (("batch=3", "batch=4"),), "micro-batches of (2, 1) are not a split of 4 sequences"),
    "another length of nothing": ("", (("length=9", "length=0"),), "length must be a whole number of at least 1, not 0"),
    "another plan": ("", (("saved_layers=0", "saved_layers=1"),), "unlike its plan"),
    "more layers than there are": ("", (("saved_layers=0", "saved_layers=9"),), "and the model has 3"),
    "other residents": ("", (("resident=()", 'resident=("epilogue",)'),), "the program has sections"),
    "residents that are not tiles": ("", (("resident=()", 'resident=("elsewhere",)'),), "are not tiles of this model"),
    "an order of some updates": ("", (("update_order=()", 'update_order=("epilogue",)'),),
                                 "update_order must be empty or name each trained tile once"),
    "another update": ("", (('lean=False, update="step"', 'lean=False, update="arrival"'),), 'the plan has update="step"'),
    "more images than the model takes": ("", (("images=1", "images=3"),), "this model takes none: leave images=1"),
    "further arguments that the model does not take": ("", (("further=()", 'further=("masked",)'),), "name each once, from "),
    "a tile named twice": ("", (("resident=()", 'resident=("epilogue", "epilogue")'),), "resident names a tile twice"),
    "more slabs than any machine has": ("", (("gradient_slabs=12", f"gradient_slabs={2**40}"),), "expected at most 4,096"),
    "more slots than any machine has": ("", (("weight_slots=2", f"weight_slots={2**40}"),), "expected at most 4,096"),
    "a longer batch than there is": ("", (("length=9", f"length={2**62}"),), "length is too large; expected at most"),
    "more micro-batches than it computes": (
        "", (("micro_batches=(2, 1)", f"micro_batches=({'1, ' * 3000})"), ("batch=3", "batch=3000")),
        "3,000 micro-batches and does not compute each call for each"),
    "more micro-batches than a program takes": (
        "", (("micro_batches=(2, 1)", f"micro_batches=({'1, ' * 20_000})"), ("batch=3", "batch=20000")),
        "20,000 micro-batches are more than the 16,384 that a program may have"),
    "a call of many tiles": (
        "", (('template="epilogue", tiles=("epilogue",)', 'template="epilogue", tiles=(' + '"epilogue", ' * 50_000 + ")"),),
        "call epilogue is CallSpec"),
    "a slab too large": ("", (('program.slot("WB0"', f'program.slot("S0", bytes={2**63 - 1})\nprogram.slot("WB0"'),),
                         "more of slabs in host memory than its plan"),
    "a slot too large": ("", (('program.slot("W1", bytes=8960)', f'program.slot("W1", bytes={2**60})'),), "device memory"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("case", REFUSED)
def test_an_edit_that_is_unsafe_or_of_another_purpose_is_refused(case: str, streamed: Any) -> None:
    section, changes, message = REFUSED[case]
    edited = edit(text_of(streamed), *changes, section=section)
    refusal = InsufficientMemoryError if "too large" in case else ProgramError
    with python_calls() as calls, pytest.raises(refusal) as caught:
        streamed.megacompile.load_program(edited)
    assert calls[0] < 2_000_000, "what was declared is built before it is refused"
    assert message in str(caught.value) and len(str(caught.value)) < 3000
    assert not streamed.megacompile.compiled(tiny_models.batch()).loaded


@pytest.mark.parametrize("stage", ["place", "model"])
def test_a_program_without_events_or_without_a_head_is_refused(stage: str, streamed: Any) -> None:
    program = streamed.megacompile.program(tiny_models.batch(), stage)
    with pytest.raises(ProgramError, match="does not say what the program was made for"):
        streamed.megacompile.load_program(program.text())
    head = next(line for line in text_of(streamed).splitlines() if line.startswith("program.shape"))
    if stage == "place":
        plan = next(line for line in text_of(streamed).splitlines() if line.startswith("program.plan"))
        text = program.text().replace("program.tile", f"{head}\n{plan}\nprogram.tile", 1)
        with pytest.raises(ProgramError, match="of stage place and has no events yet"):
            streamed.megacompile.load_program(text)


def test_a_program_stays_loaded_however_many_shapes_come(streamed: Any) -> None:
    executables = engine.executables(streamed)
    streamed.megacompile.load_program(wait_moved(text_of(streamed)))
    limit, executables.limit = executables.limit, 1
    try:
        for length in (3, 4, 5):
            streamed.megacompile.compiled(tiny_models.batch(length=length))
    finally:
        executables.limit = limit
    assert executables.table[SPEC].loaded
