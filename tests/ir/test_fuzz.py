"""Any text either parses and is verified, or is refused with its position, in linear time; nothing of it is executed."""
from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacompile.errors import LONGEST_MESSAGE, ProgramError
from megacompile.ir.program import OPS, STAGES, Program
from megacompile.ir.text import KINDS, form, parse, print_program
from megacompile.verify.verifier import RULES, judge

FOLDER = Path(__file__).resolve().parents[1] / "golden"
GOLDENS = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.txt"))]
WORD = re.compile(r'"[^"\n]*"|\w+|[^\s\w]')
JUNK = ["(", ")", ",", "=", '"', "'", "\\", ".", ":", "#", "*", "-", "[", "{", "@", "\0", "\t", "\r", "\n", "é", "\ud800",
        "lambda", "9" * 30, "__import__('os')", "None", "p", "  "]


def judged(text: str) -> Program | None:
    """The program of a text, once judged; None where it is refused. Any exception but ours escapes."""
    refused = None
    try:
        program = parse(text)
    except ProgramError as error:
        refused = str(error)
    if refused is not None:
        assert re.match(r"line \d+, column \d+: .*; expected ", refused), refused
        assert len(refused) <= LONGEST_MESSAGE
        return None
    verdicts, error = judge(program)
    assert len(verdicts) == len(RULES)
    assert (error is not None) == any(v.holds is False for v in verdicts)
    assert max(map(len, (str(error), *(v.why for v in verdicts)))) <= LONGEST_MESSAGE
    return program


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """A golden program, some lines of it moved, repeated or lost, some words exchanged for others or for anything."""
    lines = draw(st.sampled_from(GOLDENS)).split("\n")
    for _ in range(draw(st.integers(1, 3))):
        at, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
        words = WORD.findall(lines[at].split("  #")[0])
        kind = draw(st.sampled_from(("lose", "repeat", "move", "exchange", "word", "op", "junk")))
        if kind == "lose" and len(lines) > 1:
            del lines[at]
        elif kind == "repeat":
            lines.insert(other, lines[at])
        elif kind == "move":
            lines.insert(min(other, len(lines) - 1), lines.pop(at))
        elif kind == "exchange":
            lines[at], lines[other] = lines[other], lines[at]
        elif words:
            old = draw(st.sampled_from(words))
            near = WORD.findall(lines[other].split("  #")[0]) or ["p"]
            new = {"word": near, "op": list(OPS), "junk": JUNK}.get(kind, near)
            lines[at] = lines[at].replace(old, draw(st.sampled_from(new)), 1)
    return "\n".join(lines)


@settings(max_examples=50)
@given(mutations())
def test_mutated_programs_are_judged_or_refused_with_their_place(text: str) -> None:
    program = judged(text)
    if program is not None:
        assert parse(print_program(program)) == program


PRECISION = 'program.precision(scaling="row", gradients="e4m3", keep=("a", "b"), min_features=16, emulated=True)\n'


def test_any_word_in_a_precision_is_read_or_refused_with_its_place() -> None:
    head, words = HEAD.format(stage="model"), WORD.findall(PRECISION)
    assert judged(head + PRECISION) is not None
    for at in range(len(words)):
        for other in (*JUNK, "", "False", "16", '"e5m2"', "()"):
            program = judged(head + "".join([*words[:at], other, *words[at + 1:]]) + "\n")
            assert program is None or parse(print_program(program)) == program


@settings(max_examples=100)
@given(st.lists(st.sampled_from([*"pdef().,=:\"'# \n\t\\0é*-[", "program", "Program", "def", "pass", "    p.wait("]),
                max_size=60).map("".join))
def test_any_text_is_judged_or_refused_with_its_place(text: str) -> None:
    judged(text)
    judged(f"{HEAD.format(stage='model')}{text}")


HEAD = '''program = Program(stage="{stage}", micro_batches=(1, 2))
program.tile("a", parameters=4, weight_bytes=8, gradient_bytes=8, trainable=True, state_bytes=8)
program.tile("b", parameters=4, weight_bytes=8, gradient_bytes=8, trainable=False)
program.call("a", role="prologue", template="t", tiles=("a",))
program.call("b", role="epilogue", template="t", tiles=("b", "a"))
program.slot("W0", bytes=8)
program.slot("R0", bytes=8)
'''
SECTIONS = ("forward", "evaluate", "backward", "backward_accumulate", "update", "train_step", "load", "store", "x")
TEXTS = {"tile": ("a", "b"), "template": ("t",), "call": ("a", "b"), "lane": ("compute", "h2d", "cpu"),
         "access": ("read", "write"), "into": ("W0", "R0", "G0", "RW0", "D1"),
         "place": ("W0", "weights/a", "%v0", "gradients/b", "odd"),
         "key": ("loss", "v0", "evaluate"), "rule": ("lion", "adamw+muon")}


def arguments(parameter: str, kind: str, values: list[str]) -> st.SearchStrategy[str | None]:
    """What may be written for a parameter; None where it takes a value and there is none yet."""
    match kind:
        case "text":
            return st.sampled_from([f'"{text}"' for text in TEXTS[parameter]])
        case "texts":
            return st.sampled_from(('("a",)', '("a", "b")', "()"))
        case "number":
            return st.sampled_from("012")
        case "flag":
            return st.sampled_from(("True", "False"))
        case "value":
            return st.sampled_from(values) if values else st.none()
    return st.lists(st.sampled_from(values), max_size=2).map(
        lambda some: f"({', '.join(some)}{',' if len(some) == 1 else ''})") if values else st.just("()")


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Any words in any section with arguments of the right kinds, as a person might who knows the words alone."""
    lines = [HEAD.format(stage=draw(st.sampled_from(STAGES)))]
    for section in draw(st.lists(st.sampled_from(SECTIONS), min_size=1, max_size=4, unique=True)):
        lines.append(f"def {section}(p):")
        values: list[str] = []
        for number in range(draw(st.integers(1, 8))):
            op = OPS[draw(st.sampled_from(sorted(OPS)))]
            written = []
            for parameter in op.parameters:
                if parameter in op.optional and draw(st.booleans()):
                    continue
                kind = KINDS[parameter]
                written.append((parameter, draw(arguments(parameter, kind, values))))
            if all(value is not None for _, value in written):
                positional = _positional(op.name)
                inside = ", ".join(str(value) if name in positional else f"{name}={value}" for name, value in written)
                lines.append(f"    v{number} = p.{op.name}({inside})")
                values.append(f"v{number}")
        if not values:
            lines.append("    pass")
    return "\n".join(lines) + "\n"


def _positional(op: str) -> list[str]:
    """The positional parameters of an op, as its form shows them."""
    inside = form(OPS[op]).split("(", 1)[1].rstrip(")")
    return [part for part in re.sub(r"[\[\]]", "", inside).split(", ") if "=" not in part]


@settings(max_examples=200)
@given(programs())
def test_any_words_in_any_section_are_judged(text: str) -> None:
    judged(text)


# Time

def long_section(count: int) -> str:
    lines = "".join(f'    v{n} = p.leased(tile="k")\n' for n in range(count))
    return f"{GOLDENS[0][:GOLDENS[0].index('def ')]}def x(p):\n{lines}"


ADVERSARIAL: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "program = Program(" + "(" * n + ")" * n,
    "calls": lambda n: "program = " + "f(" * n + ")" * n,
    "call chain": lambda n: "f" + "()" * n,
    "dots": lambda n: "program" + ".a" * n + "(1)",
    "brackets": lambda n: "[" * n,
    "braces": lambda n: "{" * n,
    "minus": lambda n: "program = Program(stage=" + "-" * n + "1)",
    "not": lambda n: "not " * n + "x",
    "lambda": lambda n: "lambda: " * n,
    "quotes": lambda n: '"' * n,
    "backslashes in an open string": lambda n: '"' + '\\"' * n,
    "backslashes": lambda n: "\\" * n,
    "newlines": lambda n: "\n" * n,
    "blanks": lambda n: " " * n + "x",
    "one long name": lambda n: "x" * n + " = 1",
    "one long number": lambda n: "program = Program(stage=" + "9" * n + ")",
    "one long string": lambda n: 'program = Program(stage="' + "x" * n + '")',
    "a long tuple": lambda n: 'program = Program(stage="model", micro_batches=(' + "1, " * n + "1))",
    "many arguments": lambda n: "program = Program(" + "a=1, " * n + ")",
    "an open call": lambda n: GOLDENS[0] + "def x(p):\n    p.scale(v" + "\n    p.scale(v" * n,
    "many sections": lambda n: GOLDENS[0] + "".join(f"def x{i}(p):\n    pass\n" for i in range(n)),
    "many nodes": long_section,
    "indentation": lambda n: "\n".join(" " * i + "x" for i in range(min(n, 1500))),
}


def declared(micro_batches: int = 1, tiles: int = 1, calls: int = 1, slots: int = 0, tiles_a_call: int = 1,
             stage: str = STAGES[-1]) -> str:
    """Declarations of a program that is ready to run, as far as its stage says."""
    return "\n".join([
        f'program = Program(stage="{stage}", micro_batches=({"1, " * micro_batches}))',
        *(f'program.tile("t{n}", parameters=4, weight_bytes=8, gradient_bytes=8, trainable=True)' for n in range(tiles)),
        *(f'program.call("c{n}", role="layer", template="t", tiles=({tiles_a_call * """"t0", """}))' for n in range(calls)),
        *(f'program.slot("W{n}", bytes=8)' for n in range(slots)), ""])


def body(line: str, count: int, section: str = "forward", before: str = "") -> str:
    """A section of so many lines, each with its number in the place of a #."""
    return f"def {section}(p):\n{before}" + "".join(f"    {line.replace('#', str(n))}\n" for n in range(count))


#: Texts that parse, and are large in one respect: what they declare, or what their nodes refer to.
LARGE: dict[str, Callable[[int], str]] = {
    "micro-batches of many calls": lambda n: declared(micro_batches=n, calls=n) + body(
        'l# = p.forward("t", "c#", mb=0, weights=(), inputs=())', n),
    "tiles": lambda n: declared(tiles=n) + body('w# = p.prefetch("t#")', n),
    "tiles of a call": lambda n: declared(tiles_a_call=n) + body('c = p.clip(tiles=("t0",))', 1),
    "calls": lambda n: declared(calls=n) + body('l# = p.forward("t", "c#", mb=0, weights=(), inputs=())', n),
    "products that a precision keeps": lambda n: declared() + "program.precision(keep=(" + n * '"a", ' + "))\n" + body(
        'w# = p.prefetch("t0")', n),
    "slots": lambda n: declared(slots=n) + body('e# = p.enter("W#", "read", "compute")', n),
    "prefetches": lambda n: declared(slots=2) + body('w# = p.prefetch("t0", into="W0")', n),
    "records and waits": lambda n: declared(slots=1) + body(
        'e# = p.record(w)\n    p.wait("compute", e#)\n    p.wait("cpu", e#)', n, before=(
            '    w = p.prefetch("t0", into="W0")\n')),
    "leaves": lambda n: declared(slots=1) + body('p.leave("W0", "write", e)', n, before=(
        '    w = p.prefetch("t0", into="W0")\n    e = p.record(w)\n')),
    "values": lambda n: declared() + body('p.result("loss", values=(' + "l, " * n + "))", 1, before=(
        '    l = p.forward("t", "c0", mb=0, weights=(), inputs=())\n')),
    "sections": lambda n: declared() + "".join(body('e = p.enter("W0", "read", "cpu")', 1, f"x{i}") for i in range(n)),
}


def seconds(work: Callable[[], Any]) -> float:
    """The least of three, of this thread alone: other processes may be using the cores."""
    taken = []
    for _ in range(3):
        started = time.thread_time()
        work()
        taken.append(time.thread_time() - started)
    return min(taken)


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_parsing_takes_linear_time(case: str) -> None:
    """Eight times the text takes at most twenty times as long: a quadratic parser would take 64 times."""
    def read(size: int) -> float:
        text = ADVERSARIAL[case](size)

        def work() -> None:
            with contextlib.suppress(ProgramError):
                parse(text)
        return seconds(work)

    small, large = read(1_000), read(8_000)
    assert large < 20 * small + 0.02, f"{small:.4f} s, then {large:.4f} s"


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", LARGE)
def test_judging_takes_linear_time(case: str) -> None:
    """As parsing does; and what it says is short."""
    small, large = (seconds(functools.partial(judge, parse(LARGE[case](size)))) for size in (250, 2_000))
    assert large < 20 * small + 0.1, f"{small:.4f} s, then {large:.4f} s"
    judged(LARGE[case](2_000))


@pytest.mark.sample(8)
@pytest.mark.parametrize("case", ADVERSARIAL)
def test_refusals_repeat_no_more_than_a_piece_of_the_text(case: str) -> None:
    judged(ADVERSARIAL[case](20_000))


def test_verifying_a_deep_model_takes_about_linear_time(make_schedule: Callable[..., Any]) -> None:
    small, large = (seconds(functools.partial(judge, make_schedule(layers=layers).program)) for layers in (8, 64))
    assert large < 20 * small, f"{small:.4f} s, then {large:.4f} s"


def test_deep_nesting_does_not_recurse() -> None:
    """Python's own parser would overflow."""
    for case in ("parentheses", "calls", "dots", "minus", "not", "lambda"):
        with pytest.raises(ProgramError, match="line 1"):
            parse(ADVERSARIAL[case](1_000_000))
