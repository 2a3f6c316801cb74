"""Tokenizers of one token a byte, so that expectations are read as text; and chat templates of the kinds that there are."""
from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

#: Plain ChatML: nothing is marked.
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
#: The same, with marks around what is generated.
MARKED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
#: As models that think have them: thoughts of all answers but the last are left out.
THINKING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
            "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
#: Models that call tools are told of them, and shown calls as JSON.
TOOLS = ("{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.name }};{% endfor %}<|im_end|>\n{% endif %}"
         "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
         "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
#: Some templates refuse a conversation in which no user speaks.
DEMANDING = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
#: Others let only the user and the assistant speak, in turns, after the system.
ALTERNATING = ("{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
               "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML)
#: What is rendered once there is an answer does not begin with its prompt.
UNLIKE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def build(template: str | None = CHATML, end: str | None = "<|im_end|>", merges: tuple[tuple[str, str], ...] = (),
          around: str = "$A") -> Any:
    """`merges`: pairs of bytes, in the letters of byte-level tokenizers, that are one token. `around`: where the tokenizer puts
    special tokens, such as "<s> $A </s>"."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokens = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=list(merges)))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    if edges := [word for word in around.split() if word != "$A"]:
        tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_start|>", *edges]})
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[(word, tokenizer.convert_tokens_to_ids(word)) for word in edges])
    tokenizer.chat_template = template
    return tokenizer
