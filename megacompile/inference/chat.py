"""`megacompile chat`: a conversation in the terminal."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import TextStreamer

from megacompile.errors import MegacompileError
from megacompile.inference.prompts import Message, PromptEncoder
from megacompile.inference.sampling import Sampling

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def chat(model: Any, tokenizer: Any, sampling: Sampling, system: str | None, ask: Callable[[], str],
         say: Callable[[str], object]) -> None:
    """Reads messages with `ask`, which raises `EOFError` at the end, and says the answers piece by piece with `say`."""
    encoder = PromptEncoder(tokenizer, raw=False)
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    encoder.of_messages([*first, {"role": "user", "content": "Hello"}])  # refused now, and not after the first message
    messages = list(first)
    torch.manual_seed(sampling.seed)
    say(f"{HELP}\n")
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(first)
        elif text:
            asked: list[Message] = [*messages, {"role": "user", "content": text}]
            prompt = encoder.of_messages(asked)
            try:
                how = sampling.arguments(model, tokenizer, len(prompt))
            except MegacompileError as error:
                say(f"{error}{', or forget the conversation with /reset' if messages != first else ''}\n")
                continue
            messages = [*asked, {"role": "assistant", "content": _answer(model, tokenizer, prompt, how, sampling, say)}]
            say("\n")


def _answer(model: Any, tokenizer: Any, prompt: list[int], how: Mapping[str, Any], sampling: Sampling,
            say: Callable[[str], object]) -> str:
    """The answer to a prompt of these tokens, which is said while it is generated with the arguments `how`. Ctrl-C ends it
    early."""
    streamer = _Streamer(tokenizer, sampling, say)
    ids = torch.tensor([prompt], device=model.megacompile.streamed.backend.device)
    try:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=streamer, **how)
    except KeyboardInterrupt:
        streamer.end()
    return sampling.cut(streamer.text)


class _Streamer(TextStreamer):
    """Says text as soon as it is known to belong to the answer. State: the `text` so far, and how much of it was said."""

    def __init__(self, tokenizer: Any, sampling: Sampling, say: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text, self._said = "", 0
        self._sampling, self._say = sampling, say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        answer = self._sampling.cut(self.text) if stream_end else self._sampling.known(self.text)
        self._say(answer[self._said:])
        self._said = len(answer)
