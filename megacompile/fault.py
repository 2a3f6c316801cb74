"""What a rule of the verifier found, and the error that it becomes: four parts and the way out."""
from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from megacompile.errors import HazardError, ProgramError
from megacompile.listing import excerpt
from megacompile.program import Program, lane_of
from megacompile.text import print_node


@dataclass(frozen=True)
class Fault:
    """One violation: a sentence, what to do, the node at fault and the node that it conflicts with."""

    message: str
    remedy: str
    node: fx.Node | None = None
    other: fx.Node | None = None
    hazard: bool = False

    def error(self, program: Program) -> ProgramError:
        """
            HazardError: slot W0 is overwritten by prefetch layers.2 while forward layers.0 mb 0 may still read it
            in node:      w2 = p.prefetch("layers.2", into="W0")  # h2d
            inserted by:  pass prefetch
            program:      section forward, stage synchronize
              (the rows around both nodes)
            to mend:      let h2d wait for an event recorded on compute after h1_0
        """
        lines = [self.message]
        if self.node is not None:
            lane = lane_of(self.node)
            lines += [f"in node:      {print_node(self.node)}{f'  # {lane}' if lane else ''}",
                      f"inserted by:  pass {self.node.meta.get('pass') or 'unknown (the program was parsed)'}"]
            section = next((name for name, graph in program.sections.items() if graph is self.node.graph), "?")
            marks = {self.node: "ERROR HERE"}
            if self.other is not None:
                marks = {self.other: "conflicts with", **marks}
            lines += [f"program:      section {section}, stage {program.stage}", excerpt(self.node.graph, marks)]
        else:
            lines.append(f"program:      stage {program.stage}")
        lines.append(f"to mend:      {self.remedy}")
        return (HazardError if self.hazard else ProgramError)("\n".join(lines))
