"""What a training loop computes, written down without any schedule: the contents that every program must come to."""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from contents import mix, total
from oracle import Loop

from megacompile.ir.plan import Plan
from megacompile.ir.program import CallSpec, Program, gives_outputs

#: (call, micro-batch) -> what its forward made; and what the loss, or the epilogue's outputs, made, by micro-batch.
Forward = tuple[dict[tuple[str, int], int], dict[int, int]]


@dataclass
class Training:
    """Runs the lines of a loop. State: what the host has at the end, by place, and what the caller was given."""

    program: Program
    plan: Plan
    host: dict[str, int] = field(default_factory=dict)
    results: list[tuple[object, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for tile in self.program.tiles:
            self.host |= {f"{part}/{tile}": hash(f"{part}/{tile}") for part in ("weights", "state")}
        self.given = "outputs" if gives_outputs(self.program) else "loss"
        self.several = self.program.ranks * self.program.hosts > 1
        self.host |= {f"announced/{tile}": self.host[f"weights/{tile}"] for tile in self.program.tiles}
        self.trained = [name for name, tile in self.program.tiles.items() if tile.trainable]

    def run(self, loop: Loop) -> None:
        open_forwards: dict[int | None, Forward] = {}
        for line, lease in loop:
            match line:
                case "forward":
                    open_forwards[lease] = forward = self.forward()
                    self.results.append((self.given, *self.told(forward[1].values())))
                case "evaluate":
                    made, _ = self.forward()
                    last = self.program.calls[-1].name
                    self.results.append(("evaluate", *(mix("evaluate", made[last, mb]) for mb in self.micro_batches)))
                case "backward" | "backward_accumulate":
                    gradients = self.backward(open_forwards.pop(lease), scaled=self.given == "loss")
                    self.gather(gradients, line == "backward_accumulate")
                    self.arrived()
                case "train_step":
                    made, losses = self.forward()
                    waves = [{mb: losses[mb] for mb in self.plan.wave(wave)} for wave in range(self.plan.waves)]
                    self.results += [("loss", *self.told(wave.values())) for wave in waves]
                    shares = [self.backward((made, wave), scaled=False) for wave in waves]
                    summed = {tile: total(*(share[tile] for share in shares)) for tile in self.plan.host_sums
                              if tile in self.trained}
                    self.host |= {f"sums/{tile}": content for tile, content in summed.items()}
                    self.gather(self.backward((made, losses), scaled=False) | summed, False)
                    self.arrived()
                    if self.plan.update == "arrival":
                        self.gather({tile: shares[-1][tile] for tile in summed}, False)  # nobody asks for the norms of a sum
                case "refresh_lost":
                    for tile in self.plan.resident_state:
                        self.host[f"gradients/{tile}"] = hash(("lost", f"gradients/{tile}"))
                case "update":
                    self.update(mix("clip", *sorted((f"gradients/{t}", self.host[f"gradients/{t}"]) for t in self.trained)))

    def told(self, values: Collection[int]) -> Collection[int]:
        """What the caller is told: of several ranks, the loss of all rows."""
        return [mix("over ranks", mix("total", total(*values)))] if self.several and self.given == "loss" else values

    @property
    def micro_batches(self) -> range:
        return range(len(self.program.micro_batches))

    def visit(self, call: CallSpec, mb: int, *inputs: int, weightless: bool = False) -> int:
        weights = () if weightless else (self.host[f"weights/{tile}"] for tile in call.tiles)
        return mix("forward", call.name, mb, *weights, "of", *inputs)

    def forward(self) -> Forward:
        made: dict[tuple[str, int], int] = {}
        for mb in self.micro_batches:
            first, *others = self.program.calls
            shared = carried = made[first.name, mb] = self.visit(first, mb)
            for call in others:
                carried = made[call.name, mb] = self.visit(call, mb, carried, shared)
        return made, {mb: mix(self.given, made[self.program.calls[-1].name, mb]) for mb in self.micro_batches}

    def backward(self, forward: Forward, scaled: bool) -> dict[str, int]:
        """The gradients of every tile."""
        made, losses = forward
        sums = dict.fromkeys(self.trained, 0)

        def add(call: CallSpec, gradient: int) -> None:
            for number, tile in enumerate(tile for tile in call.tiles if tile in sums):
                sums[tile] = total(sums[tile], mix("part", number, gradient))

        first, *stack, last = self.program.calls
        if self.given == "outputs":  # the caller sends their gradients
            losses = {mb: mix("backward", made[last.name, mb], mix("sent", last.name, mb)) for mb in self.micro_batches}
        for loss in losses.values():
            add(last, loss)
        if scaled:
            sums |= {tile: mix("scaled", sums[tile]) for tile in last.tiles if tile in sums}
        for mb, loss in losses.items():
            gradient = mix("scaled", loss) if scaled else loss
            for call in reversed(stack):
                gradient = mix("backward", made[call.name, mb], gradient)
                add(call, gradient)
            add(first, mix("backward", self.visit(first, mb, weightless="recompute_backward" in first.weightless), gradient))
        for over, count in (("over ranks", self.program.ranks), ("over hosts", self.program.hosts)):
            sums = {tile: mix(over, gradients) if count > 1 else gradients for tile, gradients in sums.items()}
        return {tile: mix("reduced", gradients) for tile, gradients in sums.items()}

    def gather(self, gradients: dict[str, int], adds: bool) -> None:
        for tile, gradient in gradients.items():
            place = f"gradients/{tile}"
            self.host[place] = total(self.host[place], gradient) if adds else gradient

    def arrived(self) -> None:
        """All gradients of a step are there: the update of a plan that does not wait for the end of it, and clips nothing."""
        if self.plan.update == "arrival":
            self.update()

    def update(self, *clip: int) -> None:
        for tile in self.trained:
            weights, state = f"weights/{tile}", f"state/{tile}"
            moments = mix("moments", self.host[state], self.host[f"gradients/{tile}"], *clip)
            self.host |= {weights: mix("weights", self.host[weights], moments), state: moments}
            self.host[f"announced/{tile}"] = self.host[weights]
