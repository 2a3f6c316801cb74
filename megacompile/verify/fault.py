"""A fault that a verifier rule found, and the error message made from it."""
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from megacompile.errors import HazardError, ProgramError
from megacompile.ir.printing import excerpt
from megacompile.ir.program import Program, lane_of
from megacompile.ir.text import print_node


@dataclass(frozen=True)
class Fault:
    """One violation. `message`: what is wrong. `remedy`: what to do. `node` is at fault, and `other` conflicts with it.
    `order`: two accesses that nothing orders. `hazard`: accesses collide."""

    message: str
    remedy: str
    node: fx.Node | None = None
    other: fx.Node | None = None
    hazard: bool = False
    order: str = ""

    def error(self, program: Program) -> ProgramError:
        """The error to raise:

            HazardError: slot W0 is overwritten by prefetch layers.2 while forward layers.0 mb 0 may still read it
            not ordered:  write of W0 by prefetch layers.2 is not ordered after read by forward layers.0 mb 0
            in node:      w2 = p.prefetch("layers.2", into="W0")  # h2d
            inserted by:  pass prefetch
            program:      section forward, stage synchronize
              (the rows around both nodes)
            to fix:       let h2d wait for an event recorded on compute after h1_0
        """
        lines = [self.message, *([f"not ordered:  {self.order}"] if self.order else [])]
        if self.node is not None:
            lane = lane_of(self.node)
            lines += [f"in node:      {print_node(self.node)}{f'  # {lane}' if lane else ''}",
                      f"inserted by:  {_origin(self.node)}"]
            section = next((name for name, graph in program.sections.items() if graph is self.node.graph), "?")
            marks = {self.node: "ERROR HERE"}
            if self.other is not None:
                marks = {self.other: "conflicts with", **marks}
            lines += [f"program:      section {section}, stage {program.stage}", excerpt(self.node.graph, marks)]
        else:
            lines.append(f"program:      stage {program.stage}")
        lines.append(f"to fix:       {self.remedy}")
        return (HazardError if self.hazard else ProgramError)("\n".join(lines))


def _origin(node: fx.Node) -> str:
    if "line" in node.meta:
        return f"line {node.meta['line']} of the text"
    return f"pass {node.meta.get('pass') or 'unknown'}"
