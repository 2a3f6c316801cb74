"""How fast a plan is, before anything runs: its program simulated, and a bound below that costs next to nothing."""
from __future__ import annotations

from dataclasses import dataclass, field

from megacompile.durations import Durations
from megacompile.frontend.capture import CapturedModel
from megacompile.hardware import Hardware
from megacompile.lowering import model_program
from megacompile.passes import PIPELINE
from megacompile.plan import Plan
from megacompile.program import Program
from megacompile.simulate import Timeline
from megacompile.tiling import Tiling


def pace_of(captured: CapturedModel, tiling: Tiling, hardware: Hardware | None, fused: bool) -> Pace | None:
    """None where nothing is known of the machine."""
    return None if hardware is None else Pace(Durations(captured, tiling.layouts, hardware, fused), tiling)


@dataclass
class Pace:
    """Of one model on one machine. State: the programs simulated so far, by plan and whether a step is one program."""

    durations: Durations
    tiling: Tiling
    timelines: dict[tuple[Plan, bool], Timeline] = field(default_factory=dict)

    def timeline(self, plan: Plan, whole_step: bool) -> Timeline:
        """Some training steps under a plan."""
        if (plan, whole_step) not in self.timelines:
            program = self.program(plan, whole_step)
            self.timelines[plan, whole_step] = self.durations.simulate(program, plan)
        return self.timelines[plan, whole_step]

    def program(self, plan: Plan, whole_step: bool) -> Program:
        """As `compile_program` makes it, unverified: what is chosen is verified when it is compiled."""
        captured = self.durations.captured
        specs = self.tiling.call_specs(captured.calls, captured.templates)
        program = model_program(specs, self.tiling.tiles(), plan.batch, labels=True, whole_step=whole_step)
        program = program.evolve(sections={key: graph for key, graph in program.sections.items() if key != "evaluate"})
        for each in PIPELINE:
            program = each.run(program, plan)
        return program

    def at_least(self, plan: Plan) -> float:
        """Seconds that a step's templates take by themselves."""
        captured = self.durations.captured
        layers = captured.calls[1:-1]
        recomputed = len(layers) - min(plan.saved_layers, len(layers))
        total = 0.0
        for rows in plan.micro_batches:

            def seconds(template: str, variant: str, rows: int = rows) -> float:
                return self.durations.seconds(template, variant, rows, plan.length, plan.token_chunk)

            total += seconds("prologue", "forward") + seconds("epilogue", "loss")
            for position, call in enumerate(layers):
                block_end = (position + 1) % plan.checkpoint_interval == 0 or position == recomputed - 1
                if position >= recomputed:
                    total += seconds(call.template, "forward_saving") + seconds(call.template, "backward")
                elif block_end:
                    total += seconds(call.template, "forward") + seconds(call.template, "recompute_backward")
                else:
                    total += seconds(call.template, "forward") + seconds(call.template, "forward_saving") + seconds(
                        call.template, "backward")
        return total
