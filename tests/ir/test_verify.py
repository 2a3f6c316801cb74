"""Each rule of the verifier finds every way of breaking it in a good program."""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from megacompile.errors import HazardError, ProgramError
from megacompile.ir.program import Access, Lane, Program, argument, copy_section, find, lane_of, nodes, op_of
from megacompile.ir.text import parse, print_program
from megacompile.verify.ordering import Clocks
from megacompile.verify.verifier import RULES, verify

STREAMED: dict[str, Any] = {"layers": 2, "micro_batches": (1, 1)}
SLABS: dict[str, Any] = {**STREAMED, "pinned": False}
RESIDENT: dict[str, Any] = {**STREAMED, "resident": ("layers.0", "layers.1")}
DISK: dict[str, Any] = {**STREAMED, "disk_state": ("layers.0", "layers.1"), "state_slabs": 1}
ARRIVAL: dict[str, Any] = {**STREAMED, "whole_step": True, "update": "arrival"}
SUMS: dict[str, Any] = {**STREAMED, "whole_step": True, "waves": 2, "host_sums": ("layers.1", "epilogue")}
HELD: dict[str, Any] = {**STREAMED, "whole_step": True, "waves": 2, "held_state": ("layers.1",)}
RANKS: dict[str, Any] = {**STREAMED, "ranks": 2}
HOSTS: dict[str, Any] = {**STREAMED, "ranks": 2, "hosts": 2}
SINGLES: dict[str, Any] = {**STREAMED, "hosts": 2}
RANKS_RESIDENT: dict[str, Any] = {**RANKS, "resident": ("layers.0",), "resident_state": ("layers.0",)}
RANKS_SUMS: dict[str, Any] = {**SUMS, "ranks": 2}
BLOCK: dict[str, Any] = {**STREAMED, "checkpoint_interval": 2}

#: (rule, case): schedule, stage, section, pattern and replacement in that section's text, what the message says
TEXT_EDITS: dict[tuple[str, str], tuple[dict[str, Any], str, str, str, str, str]] = {
    ("well_formed", "kind of a value"): (
        STREAMED, "prefetch", "forward", r"weights=\(w1,\)", "weights=(s_0,)",
        "takes s_0 as weights, but forward makes activation"),
    ("well_formed", "use after release"): (
        STREAMED, "place", "forward", r'(    h1_0 = )', r"    p.release(w1)\n\1",
        "forward layers.0 mb 0 uses w1 after its release"),
    ("well_formed", "released twice"): (
        STREAMED, "place", "forward", r"(    p.release\(w1\))", r"\1\n\1", "releases w1 after its release"),
    ("well_formed", "tile that is not declared"): (
        STREAMED, "prefetch", "forward", r'prefetch\("layers.0"', 'prefetch("layers.9"',
        "names tile layers.9, which the program does not have"),
    ("well_formed", "call that is not declared"): (
        STREAMED, "prefetch", "forward", r'"layers.0", mb=0', '"layers.9", mb=0', "names call layers.9"),
    ("well_formed", "micro-batch that is not there"): (
        STREAMED, "prefetch", "forward", r'"layers.0", mb=1', '"layers.0", mb=2', "names mb 2"),
    ("well_formed", "template of another call"): (
        STREAMED, "prefetch", "forward", r'"decoder", "layers.0", mb=1', '"prologue", "layers.0", mb=1',
        "runs template prologue, but layers.0 is of template decoder"),
    ("well_formed", "clip of a tile that is not there"): (
        STREAMED, "place", "update", r'tiles=\(', 'tiles=("layers.9", ', "names tile layers.9"),
    ("well_formed", "slab of another tile"): (
        SLABS, "prefetch", "forward", r'(prefetch\("layers.0", staging=)k1', r"\1k0",
        "takes k0, which is of tile prologue"),
    ("well_formed", "event of a node that no lane runs"): (
        STREAMED, "synchronize", "forward", r"record\(w1\)", "record(e)", "is of a node that no lane executes"),
    ("well_formed", "event of the past handed on"): (
        STREAMED, "synchronize", "forward", r'("W0", "read", )e_16', r"\1e_3", "passes an event of an earlier section to"),
    ("well_formed", "release of an event"): (
        STREAMED, "synchronize", "forward", r"release\(w1\)", "release(e_1)", "takes e_1, but enter keeps nothing"),
    ("well_formed", "residuals of a plain forward"): (
        BLOCK, "prefetch", "backward", r"saved=r1_0", "saved=g2_0", "as saved, but recompute_backward makes gradient"),
    ("trained", "call visited twice"): (
        STREAMED, "differentiate", "forward", r'("layers.1", mb)=1', r"\1=0",
        "forward layers.1 mb 0 is the second visit of layers.1 for micro-batch 0 in forward"),
    ("trained", "call left out"): (
        STREAMED, "differentiate", "evaluate", r"    l_1 = .*\n(.*)l_0, l_1", r"\1l_0,",
        "evaluate never visits epilogue for micro-batch 1"),
    ("trained", "input of another micro-batch"): (
        STREAMED, "differentiate", "forward", r"inputs=\(h1_0, s_0\)", "inputs=(h1_1, s_0)",
        "takes h1_1 of layers.0 mb 1 as inputs"),
    ("trained", "input of another call"): (
        STREAMED, "differentiate", "forward", r"inputs=\(h1_0, s_0\)", "inputs=(s_0, s_0)",
        "takes s_0 of prologue mb 0 as inputs"),
    ("trained", "gradient of another micro-batch"): (
        STREAMED, "differentiate", "backward", r"gradient=g2_0", "gradient=g2_1",
        "takes g2_1 of layers.1 mb 1 as gradient"),
    ("trained", "residuals of another micro-batch"): (
        BLOCK, "differentiate", "backward", r"saved=r1_1", "saved=r1_0", "takes r1_0 of layers.0 mb 0 as saved"),
    ("trained", "accumulators of another tile"): (
        STREAMED, "differentiate", "backward", r"(gradient=g2_0, accumulators=)\(a1,\)", r"\1(a2,)",
        "adds to the gradients of ['layers.1'], but trains ['layers.0']"),
    ("trained", "backward left out"): (
        STREAMED, "differentiate", "backward", r"    g0_1 = .*\n", "",
        "backward never visits prologue for micro-batch 1"),
    ("trained", "not scaled"): (
        STREAMED, "differentiate", "backward", r"    p.scale\(l_1\).*\n", "", "uses l_1 before it is scaled"),
    ("trained", "scaled twice"): (
        STREAMED, "differentiate", "backward", r"(    p.scale\(l_1\).*\n)", r"\1\1", "l_1 is scaled twice"),
    ("trained", "lease never taken"): (
        STREAMED, "differentiate", "forward", r"(    h2_0 = .*\n)", r"\1    p.lease(h2_0)\n",
        "lease layers.1 mb 0 is never taken in backward"),
    ("trained", "leased twice"): (
        STREAMED, "differentiate", "forward", r"(    p.lease\(h1_0\).*\n)", r"\1\1", "layers.0 mb 0 is leased twice"),
    ("trained", "lease that the forward does not keep"): (
        STREAMED, "differentiate", "backward", r'h1_0 = p.leased\("layers.0"', 'h1_0 = p.leased("layers.1"',
        "lease layers.1 mb 0 is kept by no forward"),
    ("trained", "lease taken twice"): (
        STREAMED, "differentiate", "backward", r'h1_0 = p.leased\("layers.0"', 'h1_0 = p.leased("prologue"',
        "lease prologue mb 0 is taken twice"),
    ("well_formed", "lease of no one's value"): (
        STREAMED, "differentiate", "backward", r'h1_0 = p.leased\("layers.0", mb=0\)', "h1_0 = p.leased()",
        "leased is neither a call's value for one micro-batch nor one tile's accumulators"),
    ("well_formed", "lease of a call's value and a tile's"): (
        STREAMED, "differentiate", "backward", r'h1_0 = p.leased\("layers.0", mb=0', r'\g<0>, tile="layers.0"',
        "is neither a call's value for one micro-batch nor one tile's accumulators"),
    ("supplied", "weights of another call"): (
        STREAMED, "prefetch", "forward", r"(\"layers.0\", mb=0, weights=)\(w1,\)", r"\1(w2,)",
        "forward layers.0 mb 0 has weights of ['layers.1'], but reads ['layers.0']"),
    ("supplied", "no weights"): (
        STREAMED, "prefetch", "forward", r"(\"layers.0\", mb=0), weights=\(w1,\)", r"\1", "has weights of nothing"),
    ("on_disk", "moments that are never read"): (
        DISK, "optimizer", "update", r"    m1 = .*\n(.*)update\(\"layers.0\", clip=c, moments=m1\)(.*\n)    .*\n",
        r'\1update("layers.0", clip=c)\2', "update layers.0 would be wrong: the moments of layers.0 are on disk"),
    ("on_disk", "moments of a tile that has them in memory"): (
        DISK, "optimizer", "update", r"p.update\(\"epilogue\", clip=c\)",
        'm3 = p.read_state("epilogue")\n    p.update("epilogue", clip=c, moments=m3)',
        "read_state epilogue would be wrong: the moments of epilogue are in memory"),
    ("on_disk", "moments that are read twice"): (
        DISK, "optimizer", "update", r"(    m1 = .*\n)(.*\n)", r"\1    again = p.read_state('layers.0')\n\2".replace("'", '"'),
        "reads moments that m1 has read"),
    ("on_disk", "moments that were read too early"): (
        DISK, "optimizer", "update", r"(    m1 = .*\n)(.*\n)", r"\1\2    m1b = p.read_state('layers.0')\n".replace("'", '"'),
        "reads moments that m1 has read"),
    ("on_disk", "moments that are never written"): (
        DISK, "optimizer", "update", r"    p.write_state\(\"layers.0\".*\n", "",
        "reads moments that update never writes back: their update would be lost"),
    ("on_disk", "moments that are written before their update"): (
        DISK, "optimizer", "update", r"(    p.update\(\"layers.0\".*\n)(    p.write_state.*\n)", r"\2\1",
        "writes moments that are not updated"),
    ("on_disk", "moments that are written twice"): (
        DISK, "optimizer", "update", r"(    p.write_state\(\"layers.0\".*\n)", r"\1\1",
        "writes moments that were written before"),
    ("well_formed", "moments of another tile"): (
        DISK, "optimizer", "update", r'(update\("layers.1", clip=c, moments=)m2', r"\1m1",
        "takes m1, which is of tile layers.0"),
    ("placed", "slab of moments that are not written yet"): (
        DISK, "place", "update", r"(    p.write_state\(\"layers.0\".*\n    p.release\(m1\)\n)(    m2 = .*\n)", r"\2\1",
        "slot M0 is overwritten by read_state layers.1 while m1"),
    ("ordered", "an update that does not wait for the disk"): (
        DISK, "synchronize", "update", r'    p.wait\("cpu", e_20\).*\n', "",
        "slot M0 is overwritten by update layers.0 while read_state layers.0 may still write it"),
    ("ordered", "moments that are written while they are updated"): (
        DISK, "synchronize", "update", r'    p.wait\("disk_write", e_21\).*\n', "",
        "slot M0 is read by write_state layers.0 while update layers.0 may still write it"),
    ("ordered", "a slab that is read into while it is written from"): (
        DISK, "synchronize", "update", r'    p.wait\("disk_read", e_22\).*\n',
        '    e_99 = p.enter("moments/layers.1", "write", "disk_write")\n    p.wait("disk_read", e_99)\n'
        '    p.wait("disk_read", e_21)\n',
        "slot M0 is overwritten by read_state layers.1 while write_state layers.0 may still read it"),
    ("ordered", "moments that are read while an earlier step writes them"): (
        DISK, "synchronize", "update", r'    p.wait\("disk_read", e_7\).*\n', "",
        "tile part moments/layers.0 is read by read_state layers.0 while disk_write may still write it from an earlier"),
    ("handed_on", "moments whose write is not handed on"): (
        DISK, "synchronize", "update", r'    p.leave\("moments/layers.1", "write".*\n', "",
        "moments/layers.1 is accessed by write_state layers.1, but no leave passes an event of disk_write"),
    ("sent_home", "gradient that is never offloaded"): (
        STREAMED, "offload", "backward", r"    o2 = .*\n", "", "tile layers.1 trains, but has no offload in backward"),
    ("sent_home", "gradient that is offloaded twice"): (
        STREAMED, "offload", "backward", r"(    o2 = (.*)\n)", r"\1    again = \2\n",
        "has a second offload in backward"),
    ("sent_home", "contribution after the reduction"): (
        STREAMED, "offload", "backward", r"(    g2_1 = .*\n)(    d2 = .*\n)", r"\2\1",
        "uses a2 after it was reduced: the gradient would be lost"),
    ("sent_home", "reduction of another tile's accumulators"): (
        STREAMED, "offload", "backward", r'reduce\("layers.1", accumulators=a2\)',
        'reduce("layers.1", accumulators=a3)', "uses a3 after it was reduced"),
    ("sent_home", "reduction under another tile's name"): (
        STREAMED, "offload", "backward", r'reduce\("epilogue"(.*\n.*)offload\("epilogue"',
        r'reduce("layers.0"\1offload("layers.0"', "tile layers.0 has a second reduce in backward"),
    ("sent_home", "gradients overwritten that must be added to"): (
        STREAMED, "offload", "backward_accumulate", r"overwrite=False", "overwrite=True",
        "accumulate epilogue overwrites the tile's gradients in backward_accumulate"),
    ("sent_home", "slab that is never accumulated"): (
        STREAMED, "place", "backward_accumulate", r"    p.accumulate\(\"layers.1\".*\n", "",
        "goes to a slab and is accumulated, or used by an update, 0 times"),
    ("sent_home", "gradients offloaded over those that exist"): (
        STREAMED, "offload", "backward_accumulate", r"    p.accumulate\(\"layers.1\".*\n", "",
        "overwrites gradients that backward_accumulate must add to"),
    ("updated", "tile without an update"): (
        STREAMED, "optimizer", "update", r'    p.update\("layers.1".*\n', "",
        "tile layers.1 trains, but has no update in update"),
    ("updated", "tile updated twice"): (
        STREAMED, "optimizer", "update", r'(    p.update\("layers.1".*\n)', r"\1\1",
        "tile layers.1 has a second update in update"),
    ("updated", "frozen tile updated"): (
        {**STREAMED, "frozen": ("layers.0",)}, "optimizer", "update", r'(    p.update\("layers.1", clip=c\).*\n)',
        r'\1    p.update("layers.0", clip=c)\n', "tile layers.0 has update in update, but does not train"),
    ("updated", "tile that the norm leaves out"): (
        STREAMED, "optimizer", "update", r'"layers.0", "layers.1", ', '"layers.0", ',
        "one clip over all trainable tiles"),
    ("updated", "update by another rule than its tile's"): (
        STREAMED, "optimizer", "update", r'(update\("layers.1",)', r'\1 rule="lion",',
        "update layers.1 runs the rule lion, and its tile's is adamw"),
    ("updated", "resident copy not refreshed"): (
        RESIDENT, "optimizer", "update", r'    w2 = .*\n', "",
        "tile layers.1 is resident on the device, but update leaves its old weights there"),
    ("updated", "resident copy never made"): (
        RESIDENT, "optimizer", "load", r"    w1 = p.prefetch\(.*\n", "",
        "tile layers.0 is resident on the device, but load does not copy it there"),
    ("sent_home", "update on arrival of gradients that stay in the tile"): (
        {**STREAMED, "update": "arrival"}, "optimizer", "backward", r'(update\("layers.1"), slab=o2', r"\1",
        "update layers.1 reads gradients in host memory, which holds none, since tiles are updated on arrival"),
    ("sent_home", "update on arrival of accumulated gradients"): (
        {**SLABS, "update": "arrival"}, "optimizer", "backward", r'    p.update\("layers.1", slab=o2\)',
        r'    p.accumulate("layers.1", slab=o2, overwrite=True)\n    p.update("layers.1")',
        "update layers.1 reads gradients in host memory, which holds none, since tiles are updated on arrival"),
    ("sent_home", "wave on arrival that is added from the tile"): (
        {**SUMS, "update": "arrival"}, "optimizer", "train_step", r'(add_to_sum\("layers.1"), slab=o2_1', r"\1",
        "add_to_sum layers.1 reads gradients in host memory, which holds none"),
    ("sent_home", "slab that is accumulated although an update reads it"): (
        ARRIVAL, "place", "train_step", r'(    p.update\("layers.1")',
        r'    p.accumulate("layers.1", slab=o2, overwrite=True)\n\1',
        "goes to a slab and is accumulated, or used by an update, 2 times"),
    ("well_formed", "update from the slab of another tile"): (
        ARRIVAL, "optimizer", "train_step", r'(update\("layers.1", slab=)o2', r"\1o3", "takes o3, which is of tile epilogue"),
    ("updated", "tile without an update on arrival"): (
        {**STREAMED, "update": "arrival"}, "optimizer", "backward", r'    p.update\("layers.1", slab=o2\)',
        '    p.accumulate("layers.1", slab=o2, overwrite=True)', "tile layers.1 trains, but has no update in backward"),
    ("sent_home", "gradient on arrival that is never offloaded"): (
        {**STREAMED, "update": "arrival"}, "optimizer", "backward", r'    o2 = .*\n    p.update\("layers.1".*\n', "",
        "tile layers.1 trains, but has no offload in backward"),
    ("updated", "updated on arrival and again"): (
        ARRIVAL, "optimizer", "", r"(?s)(def train_step.*)$",
        r'\1\ndef update(p):\n    c = p.clip(tiles=("prologue",))\n    p.update("prologue", clip=c)\n',
        "tiles are updated on arrival of their gradients, and again in update"),
    ("trained", "gradient in place of an activation"): (
        STREAMED, "differentiate", "backward", r"inputs=\(h1_0, s_0\)", "inputs=(l_0, s_0)", "takes l_0 of loss as inputs"),
    ("belongs", "update in the forward"): (
        STREAMED, "synchronize", "forward", r"(    p.lease)", r'    p.update("layers.0")\n\1', "update layers.0 is in forward"),
    ("belongs", "gradient sent home in the forward"): (
        STREAMED, "offload", "forward", r"(    p.lease\(a3\).*\n)",
        r'    d = p.reduce("epilogue", accumulators=a3)\n    o = p.offload("epilogue", reduced=d)\n\1',
        "reduce epilogue is in forward"),
    ("returned", "loss that the caller never sees"): (
        STREAMED, "synchronize", "forward", r"    p.result\(.*\n", "",
        "loss epilogue mb 0 is never handed to the caller in forward"),
    ("returned", "logits of micro-batches in another order"): (
        STREAMED, "synchronize", "evaluate", r"values=\(l_0, l_1\)", "values=(l_1, l_0)",
        "evaluate hands over l_1, l_0, not l_0, l_1"),
    ("returned", "result under another name"): (
        STREAMED, "synchronize", "evaluate", r'result\("evaluate"', 'result("loss"', "which is of evaluate"),
    ("added_up", "gradients of a tile in two values"): (
        STREAMED, "differentiate", "backward", r"    (g2_1 = .*)accumulators=\(a2,\)",
        r'    more = p.zeros("layers.1")\n    \1accumulators=(more,)', "but a2 holds gradients of the same tile"),
    ("added_up", "gradients that the forward does not keep"): (
        STREAMED, "differentiate", "forward", r"(    p.lease\()a3",
        r'    more = p.zeros("epilogue")\n\1more', "adds to a3, which is not kept for the backward"),
    ("added_up", "gradient scaled that was made from scaled ones"): (
        STREAMED, "differentiate", "backward", r"(    g2_0 = .*\n)", r"\1    p.scale(g2_0)\n",
        "scale g2_0 scales a value, not a gradient that the forward kept"),
    ("one_version", "update before the gradients"): (
        {**SUMS, "update": "arrival"}, "optimizer", "train_step",
        r'(?s)(    o2 = .*)(    p.update_from_sum\("layers.1"[^\n]*\n)', r"\2\1",
        "update_from_sum layers.1 comes before the tile's gradients are in host memory in train_step"),
    ("one_version", "run on weights of the next step"): (
        ARRIVAL, "optimizer", "train_step", r'(    p.update\("layers.0", slab=o1\).*\n)',
        r'\1    w = p.prefetch("layers.0")\n'
        r'    x = p.forward("decoder", "layers.0", mb=0, weights=(w,), inputs=(s_0, s_0))\n',
        "forward layers.0 mb 0 would run on weights that update layers.0 has updated"),
    ("summed", "wave that is never added"): (
        SUMS, "offload", "train_step", r'    p.add_to_sum\("layers.1", overwrite=False\).*\n', "",
        "offload layers.1 is never added to the sum: a wave would be lost"),
    ("summed", "wave that is overwritten before it was added"): (
        SUMS, "offload", "train_step", r'    p.add_to_sum\("layers.1", overwrite=True\).*\n', "",
        "offload layers.1 overwrites a wave that was not added to the sum yet"),
    ("summed", "wave that is added twice"): (
        SUMS, "offload", "train_step", r'(    p.add_to_sum\("layers.1", overwrite=False\).*\n)', r"\1\1",
        "adds a wave that was not offloaded, or was added before"),
    ("summed", "second wave that overwrites the first"): (
        SUMS, "offload", "train_step", r'add_to_sum\("layers.1", overwrite=False\)', 'add_to_sum("layers.1", overwrite=True)',
        "add_to_sum layers.1 loses the waves before it"),
    ("summed", "sum of the step before that is added to"): (
        SUMS, "offload", "train_step", r'add_to_sum\("layers.1", overwrite=True\)', 'add_to_sum("layers.1", overwrite=False)',
        "add_to_sum layers.1 adds to the sum of the step before it"),
    ("summed", "norms of a part"): (
        SUMS, "optimizer", "train_step",
        r'(    p.add_to_sum\("layers.1", overwrite=False\).*\n)(    p.norms_of_sum.*\n)', r"\2\1",
        "the clip reads norms of the sum of layers.1, which are taken 1 times, not once after its last wave"),
    ("summed", "update with the last wave alone"): (
        SUMS, "optimizer", "update", r'update_from_sum\("layers.1"', 'update("layers.1"',
        "update layers.1 would be wrong: gradients of layers.1 are added up on the host"),
    ("summed", "update with a sum that is not there"): (
        SUMS, "optimizer", "update", r'update\("layers.0"', 'update_from_sum("layers.0"',
        "update_from_sum layers.0 would be wrong: gradients of layers.0 are not added up on the host"),
    ("summed", "wave that is never reduced"): (
        SUMS, "offload", "train_step", r'    d2_1 = .*\n    o2_1 = .*\n    p.add_to_sum\("layers.1".*\n', "",
        "a2_1 is a wave's share of the gradients of layers.1, and is never reduced"),
    ("added_up", "gradients of a tile in two values of a whole step"): (
        {**SUMS, "host_sums": ("layers.1",)}, "offload", "train_step", r"(    g1_1 = .*)accumulators=\(a1,\)",
        r'    more = p.zeros("layers.0")\n\1accumulators=(more,)', "but a1 holds gradients of the same tile"),
    ("one_version", "update on arrival before the last wave"): (
        {**SUMS, "update": "arrival"}, "optimizer", "train_step",
        r'(    p.add_to_sum\("layers.1", slab=o2_1, overwrite=False\).*\n)(    p.update_from_sum\("layers.1".*\n)', r"\2\1",
        "add_to_sum layers.1 brings gradients of a tile that update_from_sum layers.1 has updated"),
    ("placed", "slot that is alive"): (
        STREAMED, "place", "forward", r'into="W1"', 'into="W0"',
        r"slot W0 is overwritten by prefetch layers.1 while w1 (prefetch layers.0) is alive in it"),
    ("placed", "slot that is not declared"): (
        STREAMED, "place", "forward", r'into="W1"', 'into="W7"', "writes weights to slot W7, which is not declared"),
    ("placed", "slot of another kind"): (
        STREAMED, "place", "forward", r'into="W1"', 'into="G1"', "writes weights to slot G1, which is of kind reduced"),
    ("placed", "slot that is too small"): (
        STREAMED, "place", "", r'slot\("W1", bytes=\d+\)', 'slot("W1", bytes=100)',
        "prefetch layers.1 writes 2048 bytes to slot W1 of 100 bytes"),
    ("placed", "no slot"): (
        STREAMED, "place", "forward", r', into="W1"', "", "prefetch layers.1 has no place"),
    ("placed", "slot that is never free again"): (
        STREAMED, "place", "forward", r"    p.release\(w1\)\n", "",
        "w1 (prefetch layers.0) is neither released nor leased in forward"),
    ("placed", "memory that is never free again"): (
        STREAMED, "place", "forward", r"    p.release\(h2_1\).*\n", "",
        "h2_1 (forward layers.1 mb 1) is neither released nor leased in forward"),
    ("placed", "leased value released"): (
        STREAMED, "place", "forward", r"(    p.lease\(l_1\).*\n    p.result\(.*\n)", r"\1    p.release(l_1)\n",
        "l_1 is released although it is leased"),
    ("placed", "two residents in one slot"): (
        RESIDENT, "place", "forward", r'into="R1"', 'into="R0"',
        "slot R0 is resident for layers.0, but resident layers.1"),
    ("placed", "resident tile in another slot than it was loaded into"): (
        RESIDENT, "place", "", r'(?s)(program.slot\("R1", )(bytes=\d+\)\n)(.*def backward\(.*?)into="R1"',
        r'\1\2program.slot("R9", \2\3into="R9"', "layers.1 uses slot R9, but its tile stays in slot R1"),
    ("placed", "slot of no kind"): (
        STREAMED, "place", "", r'slot\("W1"', 'slot("X1", bytes=1)\nprogram.slot("W1"', "slot X1 is of an unknown family"),
    ("ordered", "read after write"): (
        STREAMED, "synchronize", "forward", r'    p.wait\("compute", e_12\).*\n', "",
        "slot W0 is read by forward layers.0 mb 0 while prefetch layers.0 may still write it"),
    ("ordered", "write after read"): (
        STREAMED, "synchronize", "forward", r'    p.wait\("h2d", e_14\).*\n', "",
        "slot WB0 is overwritten by prefetch epilogue while forward prologue mb 1 may still read it"),
    ("ordered", "write after read of an earlier section"): (
        STREAMED, "synchronize", "forward", r'    p.wait\("h2d", e_5\).*\n', "",
        "slot W0 is overwritten by prefetch layers.0 while compute may still read it from an earlier section"),
    ("ordered", "read after write of an earlier section"): (
        STREAMED, "synchronize", "forward", r'    p.wait\("h2d", e_3\).*\n', "",
        "tile part weights/layers.0 is read by prefetch layers.0 while cpu may still write it from an earlier section"),
    ("ordered", "shard overwritten while it is gathered"): (
        RANKS, "synchronize", "forward", r'    p.wait\("h2d", e_15\).*\n', "",
        "slot PB0 is overwritten by prefetch_shard epilogue while gather prologue may still read it"),
    ("ordered", "gradients reduced while ranks add them up"): (
        RANKS, "synchronize", "backward", r'    p.wait\("compute", e_19\).*\n', "",
        "value %a3 is read by reduce epilogue while reduce_scatter epilogue may still write it"),
    ("ordered", "weights read while they are gathered"): (
        RANKS, "synchronize", "forward", r'    p.wait\("compute", e_17\).*\n', "",
        "slot W0 is read by forward layers.0 mb 0 while gather layers.0 may still write it"),
    ("ordered", "norms copied while ranks share them"): (
        RANKS, "synchronize", "backward", r'    p.wait\("d2h", e_27\).*\n', "",
        "slot G0 is read by offload layers.1 while reduce layers.1 may still write it"),
    ("ordered", "event of the wrong access"): (
        STREAMED, "synchronize", "forward", r'enter\("W0", "read"', 'enter("W0", "write"', "compute may still read it"),
    ("ordered", "event of the wrong lane"): (
        STREAMED, "synchronize", "forward", r'enter\("W0", "read", "compute"', 'enter("W0", "read", "d2h"',
        "compute may still read it"),
    ("handed_on", "access that nobody hears of"): (
        STREAMED, "synchronize", "forward", r'    p.leave\("W0", "read".*\n', "",
        "W0 is accessed by forward layers.0 mb 1, but no leave passes an event of compute"),
    ("handed_on", "read for a write"): (
        STREAMED, "synchronize", "forward", r'leave\("W0", "write"', 'leave("W0", "read"',
        "is wrong: h2d does write the place"),
    ("handed_on", "write for a read"): (
        STREAMED, "synchronize", "forward", r'leave\("W0", "read"', 'leave("W0", "write"',
        "is wrong: compute does read the place"),
    ("together", "whole tile of shards"): (
        RANKS, "shard", "forward", r'w1 = p.gather\("layers.0", shard=s1\)', 'w1 = p.prefetch("layers.0")',
        "copies a whole tile, whose other shards other ranks may be updating"),
    ("together", "shard that is never gathered"): (
        RANKS, "shard", "forward", r"(    w1 = )", r'    s_9 = p.prefetch_shard("layers.0")\n\1',
        "prefetch_shard layers.0 is never gathered"),
    ("together", "gradients of one rank alone"): (
        RANKS, "shard", "backward", r'    p.reduce_scatter\("layers.1".*\n', "",
        "reduce layers.1 reduces gradients of this rank alone"),
    ("together", "gradients added up twice"): (
        RANKS, "shard", "backward", r'(    p.reduce_scatter\("layers.1".*\n)', r"\1\1",
        "adds up a2 over the ranks a second time"),
    ("together", "contribution that comes too late"): (
        RANKS, "shard", "backward", r"(    g2_1 = .*\n)(    p.reduce_scatter.*\n)", r"\2\1",
        "adds to a2 after it was added up over the ranks"),
    ("together", "gradients of one host alone"): (
        HOSTS, "shard", "backward", r'    p.all_reduce\("layers.1".*\n', "",
        "reduce layers.1 reduces gradients of this host alone"),
    ("together", "gradients of one host with one rank alone"): (
        SINGLES, "shard", "backward", r'    p.all_reduce\("layers.1".*\n', "",
        "reduce layers.1 reduces gradients of this host alone"),
    ("together", "gradients of hosts without those of other ranks"): (
        HOSTS, "shard", "backward", r'    p.reduce_scatter\("layers.1".*\n', "",
        "all_reduce layers.1 adds up a2 over the hosts before it was added up over the ranks"),
    ("together", "gradients added up over the hosts twice"): (
        SINGLES, "shard", "backward", r'(    p.all_reduce\("layers.1".*\n)', r"\1\1",
        "adds up a2 over the hosts a second time"),
    ("together", "contribution that comes after the hosts' sum"): (
        SINGLES, "shard", "backward", r"(    g2_1 = .*\n)(    p.all_reduce.*\n)", r"\2\1",
        "adds to a2 after it was added up over the hosts"),
    ("together", "sum over hosts of one host"): (
        RANKS, "shard", "backward", r'(    p.reduce_scatter\()("layers.1".*\n)', r"\1\2    p.all_reduce(\2",
        "exchanges values between hosts, but the program has one host"),
    ("together", "exchange of a rank that is alone on its host"): (
        SINGLES, "shard", "update", r"(    c = p.clip.*\n)", r'\1    p.announce(tiles=("layers.0",))\n',
        "exchanges values between the ranks of a host, but the program has one rank on each host"),
    ("together", "loss of one of several hosts"): (
        SINGLES, "shard", "forward", r"    p.share_loss.*\n", "", "returns the loss of this rank's rows"),
    ("together", "norms of a shard"): (
        RANKS, "shard", "backward", r'    p.share_norms\("layers.1".*\n', "",
        "offload layers.1 reads norms of this rank's shard"),
    ("together", "norms of whole gradients, shared again"): (
        RANKS, "shard", "backward", r'(    p.share_norms\("layers.1".*\n)', r"\1\1",
        "share_norms layers.1 would add up norms of whole gradients"),
    ("together", "norms of a shard's sum"): (
        RANKS_SUMS, "shard", "train_step", r'    p.share_host_norms\("layers.1".*\n', "",
        "norms_of_sum layers.1 takes are those of a shard, and are never exchanged"),
    ("together", "norms that are shared twice"): (
        RANKS_SUMS, "shard", "train_step", r'(    p.share_host_norms\("layers.1".*\n)', r"\1\1",
        "would add up norms of whole gradients"),
    ("together", "weights of one device"): (
        RANKS_RESIDENT, "shard", "update", r"    p.gather_resident.*\n", "",
        "each device has only its own shard of the weights"),
    ("together", "loss of one rank"): (
        RANKS, "shard", "forward", r"    share_loss.*\n|    p.share_loss.*\n", "", "returns the loss of this rank's rows"),
    ("together", "update that is not announced"): (
        RANKS, "shard", "update", r"    p.announce.*\n", "", "0 announce in a section that updates"),
    ("together", "tile that is not announced"): (
        RANKS, "shard", "update", r'announce\(tiles=\("prologue", ', 'announce(tiles=(', "leaves out prologue"),
    ("together", "exchange of one rank"): (
        STREAMED, "shard", "update", r"(    c = p.clip.*\n)", r'\1    p.announce(tiles=("layers.0",))\n',
        "exchanges values between ranks, but the program has one rank"),
    ("handed_on", "event that fires too early"): (
        STREAMED, "synchronize", "forward", r'(leave\("W1", "write", )e_13', r"\1e_12",
        "e_12 fires before prefetch layers.1 is done"),
    ("updated", "a held tile whose state does not return"): (
        HELD, "optimizer", "update", r"    p.return_state.*\n", "", "tile layers.1 trains, but has no return_state in update"),
    ("updated", "a held tile that returns before its update"): (
        HELD, "optimizer", "update", r"(    p.update_held.*\n)(    p.return_weights.*\n)", r"\2\1",
        "return_weights layers.1 comes after no update of its tile"),
    ("updated", "a held tile that was not fetched"): (
        HELD, "optimizer", "train_step", r"    p.fetch_held.*\n", "",
        "tile layers.1 trains, but has no fetch_held in train_step"),
    ("handed_on", "place that was not touched"): (
        STREAMED, "synchronize", "update", r'leave\("gradients/prologue", "read"', 'leave("D0", "read"',
        "but cpu does not access D0 in update"),
}


def edit_text(program: Program, section: str, pattern: str, replacement: str) -> Program:
    text = print_program(program)
    start = text.index(f"def {section}(p)") if section else 0
    edited, count = re.subn(pattern, replacement, text[start:], count=1)
    assert count == 1, f"{pattern} is not in {section}"
    return parse(text[:start] + edited)


@pytest.mark.parametrize("case", TEXT_EDITS, ids=" ".join)
def test_every_broken_rule_is_named(case: tuple[str, str], make_schedule: Callable[..., Any]) -> None:
    schedule, stage, section, pattern, replacement, message = TEXT_EDITS[case]
    program = make_schedule(**schedule).stages[stage]
    verify(program)
    with pytest.raises(ProgramError) as caught:
        verify(edit_text(program, section, pattern, replacement))
    assert message in str(caught.value).splitlines()[0]


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule, _ in RULES} == {rule for rule, _ in TEXT_EDITS}


def test_an_event_that_is_recorded_before_the_access_orders_nothing(make_schedule: Callable[..., Any]) -> None:
    def early(listed: list[fx.Node]) -> None:
        reader = next(n for n in listed if n.name == "s_1")
        record = next(n for n in reader.users if op_of(n).name == "record")
        earlier = next(n for n in listed if n.name == "s_0")
        earlier.append(record)
        record.kwargs = {"node": earlier}

    program = edit_graph(make_schedule(**STREAMED).program, "forward", early)
    with pytest.raises(HazardError, match="slot WB0 is overwritten by prefetch epilogue while forward prologue mb 1"):
        verify(program)


# What text cannot say

def edit_graph(program: Program, section: str, edit: Callable[[list[fx.Node]], None]) -> Program:
    graph = copy_section(program.section(section))
    edit(list(nodes(graph)))
    return program.evolve(sections={**program.sections, section: graph})


def named(listed: list[fx.Node], name: str) -> fx.Node:
    return next(node for node in listed if node.name == name)


def test_a_wait_before_its_record_is_a_deadlock(make_schedule: Callable[..., Any]) -> None:
    def late(listed: list[fx.Node]) -> None:
        event = next(n for n in find(listed[0].graph, "record"))
        listed[-1].append(event)

    program = edit_graph(make_schedule(**STREAMED).program, "forward", late)
    with pytest.raises(HazardError, match=r"e_11 comes before its event is recorded: the lane would never go on"):
        verify(program)


def test_a_value_used_before_it_is_defined_is_refused(make_schedule: Callable[..., Any]) -> None:
    program = edit_graph(make_schedule(**STREAMED).stages["prefetch"], "forward",
                         lambda listed: listed[-1].append(named(listed, "w1")))
    with pytest.raises(ProgramError, match=r"forward layers\.0 mb 0 uses w1 before it is defined"):
        verify(program)


def unknown_argument(listed: list[fx.Node]) -> None:
    listed[0].kwargs = {**listed[0].kwargs, "speed": 3}


def missing_argument(listed: list[fx.Node]) -> None:
    listed[0].kwargs = {}


def argument_of_another_type(listed: list[fx.Node]) -> None:
    listed[0].kwargs = {**listed[0].kwargs, "mb": "zero"}


def no_op_of_ours(listed: list[fx.Node]) -> None:
    listed[0].graph.placeholder("batch")


def a_function_of_python(listed: list[fx.Node]) -> None:
    listed[0].graph.call_function(print, (listed[0],))


@pytest.mark.parametrize(("edit", "message"), [
    (unknown_argument, "forward has arguments that it does not take (['speed'])"),
    (missing_argument, "lacks some (['template', 'call', 'mb', 'inputs'])"),
    (argument_of_another_type, "argument mb of forward is 'zero', not a number"),
    (no_op_of_ours, "placeholder of batch is not an op of a schedule"),
    (a_function_of_python, "is not an op of a schedule")])
def test_a_node_of_another_shape_is_refused(edit: Callable[[list[fx.Node]], None], message: str,
                                            make_schedule: Callable[..., Any]) -> None:
    program = edit_graph(make_schedule(**STREAMED).stages["micro_batch"], "forward", edit)
    with pytest.raises(ProgramError) as caught:
        verify(program)
    assert message in str(caught.value).splitlines()[0]


@pytest.mark.parametrize(("stage", "section", "message"), [
    ("differentiate", "backward", "the program has a forward and no backward"),
    ("offload", "backward_accumulate", "the program has a forward and no backward_accumulate"),
    ("optimizer", "update", "the program has a backward and no update")])
def test_a_missing_section_is_refused(stage: str, section: str, message: str,
                                      make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(**STREAMED).stages[stage]
    rest = {name: graph for name, graph in program.sections.items() if name != section}
    with pytest.raises(ProgramError, match=message):
        verify(program.evolve(sections=rest))


def test_declarations_must_agree(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(**STREAMED).stages["model"]
    tiles = {name: tile for name, tile in program.tiles.items() if name != "layers.1"}
    with pytest.raises(ProgramError, match=r"call layers\.1 reads tile layers\.1, which is not"):
        verify(program.evolve(tiles=tiles))
    with pytest.raises(ProgramError, match="two calls have the same name"):
        verify(program.evolve(calls=(*program.calls, program.calls[1])))


def test_programs_of_other_shapes_must_have_the_same_tiles(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(**STREAMED).program
    verify(program, [make_schedule(layers=2, micro_batches=(3,)).program])
    with pytest.raises(ProgramError, match=r"tile layers\.0 is .* in a program of another shape"):
        verify(program, [make_schedule(**STREAMED, frozen=("layers.0",)).program])


def test_what_stays_on_the_device_has_one_slot_in_programs_of_all_shapes(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(**RESIDENT).program
    text = print_program(program)
    swapped = parse(text.replace('"R0"', '"R9"').replace('"R1"', '"R0"').replace('"R9"', '"R1"'))
    verify(swapped)
    with pytest.raises(ProgramError, match=r"slot R1 keeps tile layers\.0, but layers\.1 in a program of another shape"):
        verify(swapped, [program])
    verify(swapped, [make_schedule(**STREAMED, resident=("layers.0",)).program])  # between the two, all is loaded anew


# Errors

def test_an_error_has_four_parts_and_the_way_out(make_schedule: Callable[..., Any]) -> None:
    def forget(listed: list[fx.Node]) -> None:
        for node in listed:
            if op_of(node).name == "wait" and argument(node, "event").name == "e_14":
                node.graph.erase_node(node)

    with pytest.raises(HazardError) as caught:
        verify(edit_graph(make_schedule(**STREAMED).program, "forward", forget))
    assert re.sub(r" +\n", "\n", str(caught.value)) == '''\
slot WB0 is overwritten by prefetch epilogue while forward prologue mb 1 may still read it
not ordered:  write of WB0 by prefetch epilogue is not ordered after read by forward prologue mb 1
in node:      w3 = p.prefetch("epilogue", into="WB0")  # h2d
inserted by:  pass prefetch
program:      section forward, stage synchronize
      #  -           h2d                     compute
     26  .           .                       wait compute e_11
     27  .           .                       s_0 = forward prologue mb 0
     28  .           .                       lease s_0
     29  .           .                       s_1 = forward prologue mb 1  <-- conflicts with
     30  .           .                       e_14 = record s_1
     31  release w0  .                       .
     32  .           wait h2d e_9            .
     33  .           wait h2d e_10           .
     34  .           w3 = prefetch epilogue  .                            <-- ERROR HERE
     35  .           e_15 = record w3        .
     36  .           .                       lease s_1
     37  .           .                       wait compute e_12
to fix:       let h2d wait for an event recorded on compute after s_1'''


def test_an_error_in_a_deep_program_stays_short(make_schedule: Callable[..., Any]) -> None:
    program = make_schedule(layers=28, micro_batches=(1, 1)).program
    with pytest.raises(HazardError) as caught:
        verify(edit_graph(program, "backward", lambda listed: listed[0].graph.erase_node(
            [n for n in listed if op_of(n).name == "wait"][-3])))
    assert len(str(caught.value).splitlines()) < 26
    assert max(map(len, str(caught.value).splitlines())) < 200


# Clocks

def section(text: str) -> fx.Graph:
    head = 'program = Program(stage="model", micro_batches=(1,))\n'
    return parse(head + "def forward(p):\n" + "".join(f"    {line}\n" for line in text.splitlines())).section("forward")


def hazards(text: str) -> list[tuple[str, str, str | None]]:
    clocks, found = Clocks(), []
    for node in nodes(section(text)):
        found += [(h.place, str(lane_of(h.node)), h.earlier and h.earlier.name) for h in clocks.hazards(node)]
        clocks.step(node)
    return found


def test_events_order_through_a_third_lane() -> None:
    """compute -> d2h -> cpu: the cpu waits for d2h alone, and is ordered after compute too."""
    text = """\
b = p.enter("G0", "read", "d2h")
p.wait("compute", b)
c = p.enter("D0", "read", "cpu")
p.wait("d2h", c)
f = p.enter("gradients/t", "read", "d2h")
p.wait("cpu", f)
h = p.enter("gradients/t", "read", "h2d")
p.wait("cpu", h)
a = p.zeros("t")
d = p.reduce("t", accumulators=a, into="G0")
e = p.record(d)
p.wait("d2h", e)
o = p.offload("t", reduced=d, into="D0")
g = p.record(o)
p.wait("cpu", g)
p.accumulate("t", slab=o, overwrite=True)"""
    assert hazards(text) == []
    assert hazards(text.replace('p.wait("cpu", g)\n', "")) == [("D0", "cpu", "o")]
    assert hazards(text.replace('p.wait("d2h", e)\n', "")) == [("G0", "d2h", "d")]


def test_an_event_of_the_present_covers_the_past_of_its_lane() -> None:
    """Lanes run on across sections: after any event of d2h, d2h's earlier sections are done too."""
    text = """\
d = p.leased(tile="t")
x = p.record(d)
p.wait("d2h", x)
c = p.enter("D0", "read", "cpu")
p.wait("d2h", c)
o = p.offload("t", reduced=d, into="D0")
g = p.record(o)
p.wait("cpu", g)
h = p.enter("gradients/t", "read", "h2d")
p.wait("cpu", h)
p.accumulate("t", slab=o, overwrite=True)"""
    assert hazards(text) == []
    assert ("gradients/t", "cpu", None) in hazards(text.replace('p.wait("cpu", g)\n', ""))


def test_a_lane_is_ordered_after_its_own_past() -> None:
    assert hazards('c = p.clip(tiles=())\np.update("t", clip=c)') == [
        ("gradients/t", "cpu", None), *[("weights/t", "cpu", None)] * 4]  # written by h2d and d2h; read by h2d, and by pack


def test_the_last_accesses_of_each_lane_are_known_by_sort() -> None:
    clocks = Clocks()
    graph = section('c = p.clip(tiles=("t",))\nu = p.update("t", clip=c)\ne = p.record(u)')
    for node in nodes(graph):
        clocks.step(node)
    update = next(find(graph, "update"))
    assert clocks.last() == {("gradients/t", Lane.CPU): {Access.READ: update},
                             ("weights/t", Lane.CPU): {Access.WRITE: update}}
    assert clocks.covers(next(find(graph, "record")), update)
