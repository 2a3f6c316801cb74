"""Options of sampling, and the ends of answers."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from megacompile.errors import MegacompileError

#: Most tokens of an answer by default.
NEW_TOKENS = 256
_PANEL = "Sampling"


@dataclass(frozen=True)
class Sampling:
    """Options of generation. A temperature of 0 chooses the most probable token. None stands for the model's default."""

    max_new_tokens: Annotated[int | None, typer.Option(
        min=1, rich_help_panel=_PANEL, help="Most tokens of an answer.",
        show_default=f"{NEW_TOKENS}, or what the prompt leaves of the model's positions")] = None
    temperature: Annotated[float | None, typer.Option(
        min=0.0, rich_help_panel=_PANEL, help="Randomness. 0: always the most probable token.",
        show_default="the model's")] = None
    top_p: Annotated[float | None, typer.Option(
        min=0.0, max=1.0, rich_help_panel=_PANEL,
        help="Choose among the most probable tokens that have this probability together.", show_default="the model's")] = None
    top_k: Annotated[int | None, typer.Option(
        min=1, rich_help_panel=_PANEL, help="Choose among this many of the most probable tokens.",
        show_default="the model's")] = None
    stop: Annotated[list[str] | None, typer.Option(
        rich_help_panel=_PANEL, help="End an answer at this text, which is left out. Repeat for more.")] = None
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_PANEL, help="Seed of the random choices.")] = 0

    def arguments(self, model: Any, tokenizer: Any, prompt: int) -> dict[str, Any]:
        """Arguments of `generate` for prompts of at most this many tokens."""
        found: dict[str, Any] = {"max_new_tokens": self.new_tokens(model.config, prompt), "pad_token_id": filler(model)}
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.temperature == 0:  # what the model comes with would not count, and transformers would warn
            found |= {"do_sample": False, **dict.fromkeys(chosen)}
        else:
            found |= {name: value for name, value in chosen.items() if value is not None}
            found |= {} if self.temperature is None else {"do_sample": True}
        if self.stop:
            found |= {"stop_strings": list(self.stop), "tokenizer": tokenizer}
        return found

    def check(self, config: Any, prompt: int) -> None:
        """Raises `MegacompileError` if a prompt of this many tokens leaves too few positions for `max_new_tokens`, or none."""
        left = self.new_tokens(config, prompt)
        if self.max_new_tokens is not None and left < self.max_new_tokens:
            raise MegacompileError(f"the prompt has {prompt:,} tokens and leaves {left:,} of the model's positions, but "
                                   f"--max-new-tokens is {self.max_new_tokens:,}: give {left} or less, or leave it out")

    def new_tokens(self, config: Any, prompt: int) -> int:
        """The most tokens of an answer. Raises `MegacompileError` if `prompt` is more than the positions of the model."""
        wanted = self.max_new_tokens or NEW_TOKENS
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
        if positions <= 0:
            return wanted
        if prompt > positions:
            raise MegacompileError(f"the prompt has {prompt:,} tokens, more than the {positions:,} positions of the model: "
                                   "shorten it")
        return min(wanted, positions - prompt + 1)  # the model does not read an answer's last token

    def cut(self, text: str) -> str:
        """An answer up to its first stop text."""
        ends = [index for stop in self.stop or () if (index := text.find(stop)) >= 0]
        return text[:min(ends)] if ends else text

    def known(self, text: str) -> str:
        """The part of an unfinished answer that `cut` will keep in any case: without an end that may begin a stop text."""
        begun = (size for stop in self.stop or () for size in range(1, len(stop)) if text.endswith(stop[:size]))
        kept = self.cut(text)
        return kept if kept != text else text[:len(text) - max(begun, default=0)]


def end_tokens(model: Any) -> set[int]:
    """The tokens that end an answer."""
    ends = getattr(model.generation_config, "eos_token_id", None)
    return {*ends} if isinstance(ends, list) else set() if ends is None else {ends}


def filler(model: Any) -> int:
    """The token that fills rows, before a prompt and after an answer: one that ends answers, if there is one. Tokenizers may
    have a padding token that the model does not know."""
    return min(end_tokens(model), default=0)
