"""Rows -> conversations -> tokens, and which tokens the loss counts."""
from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizer import CHATML, MARKED, THINKING, TOOLS, UNLIKE, build
from tokenizers import processors

from megacompile.errors import MegacompileError
from megacompile.finetuning.chat import ChatEncoder
from megacompile.finetuning.formats import Format, detect, messages_of
from megacompile.finetuning.tools import tools_of

USER, HELLO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
MORE, BYE = {"role": "user", "content": "go"}, {"role": "assistant", "content": "bye"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
    "name": "add", "arguments": {"a": 1}}}]}
RESULT, TOOL = {"role": "tool", "content": "2"}, {"name": "add"}
LONG = [{"role": "system", "content": "be brief"}, USER, HELLO, MORE, BYE]


def shown(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    """Each sequence as text, with what is learned in brackets."""
    found = []
    for encoded in ChatEncoder(tokenizer).encode(messages, tools):
        assert len(encoded.tokens) == len(encoded.learned)
        text, before = "", False
        for token, learned in zip([*encoded.tokens, None], [*encoded.learned, False], strict=True):
            text += "]" if before and not learned else "[" if learned and not before else ""
            text += tokenizer.decode([token]) if token is not None else ""
            before = learned
        found.append(text)
    return found


# ---------------------------------------------------------------- formats
@pytest.mark.parametrize(("format", "row", "expected"), [
    (Format.ALPACA, {"instruction": "hi", "output": "hello"}, [USER, HELLO]),
    (Format.ALPACA, {"instruction": "hi", "input": "", "output": "hello"}, [USER, HELLO]),
    (Format.ALPACA, {"instruction": "add", "input": "1, 2", "output": "hello"},
     [{"role": "user", "content": "add\n\n1, 2"}, HELLO]),
    (Format.SHAREGPT, {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"},
                                         {"from": "gpt", "value": "hello"}]}, [LONG[0], USER, HELLO]),
    (Format.MESSAGES, {"messages": [USER | {"name": None}, HELLO | {"thought": "well"}]}, [USER, HELLO | {"thought": "well"}]),
    (Format.ALPACA, {"instruction": "hi", "output": "hello", "system": "be brief", "history": []}, [LONG[0], USER, HELLO]),
    (Format.SHAREGPT, {"conversations": [
        {"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "add", "arguments": "{\\"a\\": 1}"}'},
        {"from": "observation", "value": "2"}]}, [USER, CALL, RESULT]),
    (Format.MESSAGES, {"messages": [USER | {"tool_calls": []}, {"role": "assistant", "content": None, "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}, RESULT]}, [USER, CALL, RESULT]),
], ids=str)
def test_each_format_is_a_conversation(format: Format, row: dict[str, Any], expected: list[dict[str, str]]) -> None:
    assert messages_of(row, format) == expected
    assert detect(row) is format


@pytest.mark.parametrize(("columns", "format"), [
    (("id", "text"), Format.TEXT), (("instruction", "input", "output", "text"), Format.ALPACA),
    (("messages", "text"), Format.MESSAGES)])
def test_conversations_go_before_texts_and_other_columns_are_not_read(columns: tuple[str, ...], format: Format) -> None:
    assert detect(dict.fromkeys(columns, "")) is format


def test_columns_of_no_format_or_of_two_are_refused() -> None:
    with pytest.raises(MegacompileError, match=r"the columns answer, question fit no format: rename them"):
        detect({"question": "", "answer": ""})
    with pytest.raises(MegacompileError, match=r"fit messages and sharegpt: choose one with --format"):
        detect({"messages": [], "conversations": []})


@pytest.mark.parametrize("row", [
    {"prompt": "hi", "chosen": "hello", "rejected": "no"}, {"instruction": "hi", "output": "", "chosen": "a", "rejected": "b"},
    {"conversations": [], "chosen": {"from": "gpt", "value": "hello"}, "rejected": {"from": "gpt", "value": "no"}}])
def test_preferences_are_for_dpo_whatever_other_columns_there_are(row: dict[str, Any]) -> None:
    with pytest.raises(MegacompileError, match=r"chosen and rejected hold preferences.*megacompile\.dpo\.DPOTrainer"):
        detect(row)


@pytest.mark.parametrize("good", [True, False])
def test_verdicts_on_answers_are_for_kto_and_labels_of_other_kinds_are_not_read(good: bool) -> None:
    with pytest.raises(MegacompileError, match=r"the column label says of each answer whether it is good.*KTOTrainer"):
        detect({"messages": [], "label": good})
    assert detect({"messages": [], "label": "physics"}) is detect({"messages": [], "label": 1}) is Format.MESSAGES


def test_rows_under_a_key_are_pointed_at() -> None:
    with pytest.raises(MegacompileError, match=r"the columns data, version fit no format.*those under the key data, keep only"):
        detect({"version": 2, "data": [{"instruction": "hi", "output": "hello"}]})


@pytest.mark.parametrize(("format", "row", "reason"), [
    (Format.ALPACA, {"instruction": "hi"}, "output is missing"),
    (Format.ALPACA, {"instruction": "hi", "output": 3}, "output is a int, not text"),
    (Format.SHAREGPT, {"conversations": "hi"}, "conversations is a str, not a list of messages"),
    (Format.SHAREGPT, {"conversations": []}, "conversations is empty"),
    (Format.SHAREGPT, {"conversations": [{"from": "human", "value": "hi"}, {"from": "bot", "value": "x"}]},
     "message 2: from is 'bot', but must be one of human"),
    (Format.SHAREGPT, {"conversations": [{"from": "human", "value": "hi"}]}, r"no message is by the assistant \(roles: user\)"),
    (Format.MESSAGES, {"messages": [USER, {"role": "asistant", "content": "x"}]}, r"\(roles: asistant, user\)"),
    (Format.MESSAGES, {"messages": [USER, "hello"]}, "message 2: is a str, not an object with role"),
    (Format.MESSAGES, {"messages": [USER, {"role": "assistant", "content": None}]}, "message 2: content is missing"),
    (Format.MESSAGES, {"messages": LONG, "system": "be long"}, "both a column system and a first message"),
    (Format.ALPACA, {"instruction": "hi", "output": "hello", "history": [["a", "b"]]}, "history is not empty"),
    (Format.SHAREGPT, {"conversations": [{"from": "function_call", "value": "add(1)"}]}, "message 1: the function call"),
    (Format.MESSAGES, {"messages": [{"role": "assistant", "tool_calls": ["add"]}]}, "message 1: a tool call must be an object"),
], ids=str)
def test_an_invalid_row_is_refused_with_the_reason(format: Format, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        messages_of(row, format)


@pytest.mark.parametrize(("column", "tools"), [
    (None, None), ([], None), ("", None), ([TOOL], [TOOL]),
    ('[{"name": "add"}]', [TOOL]), (['{"name": "add"}'], [TOOL])], ids=str)
def test_tools_are_objects_or_json_of_them(column: Any, tools: Any) -> None:
    assert tools_of({"tools": column}) == tools


@pytest.mark.parametrize("column", ["add", 3, ["add"], [3]])
def test_tools_that_are_none_are_refused(column: Any) -> None:
    with pytest.raises(MegacompileError, match="tool"):
        tools_of({"tools": column})


# ---------------------------------------------------------------- tokens
def test_tools_are_told_and_calls_of_them_are_learnt() -> None:
    (text,) = shown(build(TOOLS), [USER, CALL, RESULT, BYE], [TOOL])
    assert text == ("<|im_start|>tools\nadd;<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
                    '[add {"a": 1}<|im_end|>]\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n[bye<|im_end|>]\n')


def test_a_template_that_says_nothing_of_tools_or_calls_is_refused() -> None:
    with pytest.raises(MegacompileError, match="ignores tools"):
        ChatEncoder(build()).encode([USER, HELLO], [TOOL])
    with pytest.raises(MegacompileError, match="ignores tool calls"):
        ChatEncoder(build()).encode([USER, CALL])


ALL_ANSWERS = ("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
               "<|im_start|>assistant\n[hello<|im_end|>]\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n[bye<|im_end|>]\n")


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_every_answer_and_its_end_are_learnt_and_nothing_else(template: str) -> None:
    assert shown(build(template), LONG) == [ALL_ANSWERS]


def test_a_mark_that_ends_in_a_space_ends_there() -> None:
    """Offsets of some tokenizers leave spaces out; the token after the mark is still not learned."""
    tokenizer = build("{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
                      "{% else %}{{ m.content }}{% endif %}{% endfor %}")
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert shown(tokenizer, [USER, {"role": "assistant", "content": "well "}, MORE, BYE]) == ["hi[well] go[bye]"]


def test_what_follows_the_last_answer_is_left_out_where_nothing_is_marked() -> None:
    assert shown(build(), [USER, HELLO, MORE]) == ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[hello<|im_end|>]\n"]


def test_an_answer_that_is_rendered_otherwise_once_more_follows_is_learnt_as_it_was_given() -> None:
    assert shown(build(THINKING), [USER, HELLO, MORE, BYE]) == [
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[<think>hello<|im_end|>]\n",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\n[<think>bye<|im_end|>]\n"]


def test_a_prompt_has_the_tokens_of_generation_where_the_answer_would_join_them() -> None:
    """Two line ends are one token: the answer's must not become one with the prompt's."""
    tokenizer = build(merges=(("\u010a", "\u010a"),))
    answer = {"role": "assistant", "content": "\nhello"}
    (encoded,) = ChatEncoder(tokenizer).encode([USER, answer])
    prompt = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert encoded.tokens[:len(prompt)] == prompt and not any(encoded.learned[:len(prompt)])
    assert tokenizer.decode([t for t, learned in zip(encoded.tokens, encoded.learned, strict=True) if learned]) == (
        "\nhello<|im_end|>")
    joined = tokenizer.apply_chat_template([USER, answer])["input_ids"]
    assert joined[:len(prompt)] != prompt, "the tokenizer of this test joins nothing"


def test_a_tokenizer_without_a_template_gets_one() -> None:
    tokenizer = build(template=None)
    assert shown(tokenizer, LONG) == ["be brief\n\n### User:\nhi\n\n### Assistant:\n[hello<|im_end|>]\n\n### User:\ngo\n\n"
                                      "### Assistant:\n[bye<|im_end|>]\n\n"]
    assert tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True) == (
        "### User:\nhi\n\n### Assistant:\n")


@pytest.mark.parametrize(("template", "messages", "reason"), [
    (UNLIKE, [USER, HELLO], r"does not begin an answered conversation with its prompt.*mark them in the template"),
    ("{{ raise_exception('roles must alternate') }}", [USER, HELLO], r"refuses the conversation \(roles must"),
    ("{{ messages[0].content }}{% generation %}{% endgeneration %}", [USER, HELLO], "marks no text as generated"),
    (CHATML, [HELLO, USER, BYE], "the first message is the assistant's"),
])
def test_what_a_template_cannot_do_is_refused(template: str, messages: list[dict[str, str]], reason: str) -> None:
    with pytest.raises(MegacompileError, match=reason):
        ChatEncoder(build(template)).encode(messages)


def test_a_tokenizer_that_cannot_end_an_answer_is_refused() -> None:
    with pytest.raises(MegacompileError, match="neither a chat template nor an end-of-sequence token: set"):
        ChatEncoder(build(template=None, end=None))
