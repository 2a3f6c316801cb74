"""Rows -> conversations -> tokens, and which tokens the loss counts."""
from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from tiny_tokenizer import ALTERNATING, CHATML, DEMANDING, MARKED, THINKING, TOOLS, UNLIKE, build
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
    with pytest.raises(MegacompileError, match=r"chosen and rejected hold preferences: add --task dpo"):
        detect(row)


@pytest.mark.parametrize("good", [True, False])
def test_verdicts_on_answers_are_for_kto_and_labels_of_other_kinds_are_not_read(good: bool) -> None:
    with pytest.raises(MegacompileError, match=r"the column label says of each answer whether it is good.*add --task kto"):
        detect({"messages": [], "label": good})
    assert detect({"messages": [], "label": "physics"}) is detect({"messages": [], "label": 1}) is Format.MESSAGES


def test_rows_under_a_key_are_pointed_at() -> None:
    with pytest.raises(MegacompileError, match=r"the columns data, version fit no format.*those under the key data, keep only"):
        detect({"version": 2, "data": [{"instruction": "hi", "output": "hello"}]})


@pytest.mark.parametrize(("format", "row", "reason"), [
    (Format.ALPACA, {"instruction": "hi"}, "output is missing"),
    (Format.ALPACA, {"instruction": "hi", "output": 3}, "output is of type int, not text"),
    (Format.SHAREGPT, {"conversations": "hi"}, "conversations is a str, not a list of messages"),
    (Format.SHAREGPT, {"conversations": []}, "conversations is empty"),
    (Format.SHAREGPT, {"conversations": [{"from": "human", "value": "hi"}, {"from": "bot", "value": "x"}]},
     "message 2: from is 'bot', but must be one of human"),
    (Format.SHAREGPT, {"conversations": [{"from": "human", "value": "hi"}]}, r"no message is by the assistant \(roles: user\)"),
    (Format.MESSAGES, {"messages": [USER, {"role": "asistant", "content": "x"}]}, r"\(roles: asistant, user\)"),
    (Format.MESSAGES, {"messages": [USER, "hello"]}, "message 2: is of type str, not an object with role"),
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


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_text_in_parts_is_the_text_that_they_are_together(role: str) -> None:
    def row(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": each, "content": content if each == role else "x"} for each in ("user", "assistant")]}

    parts = [{"type": "text", "text": "one ", "image_url": None}, {"type": "text", "text": "two"}]
    assert messages_of(row(parts), Format.MESSAGES) == messages_of(row("one two"), Format.MESSAGES)
    for other, reason in (({"type": "image", "url": "x"}, "a part that is of type 'image'"), ("two", "a part that is a str"),
                          ({"type": "text"}, "text is missing")):
        with pytest.raises(MegacompileError, match=rf"message \d: .*{reason}"):
            messages_of(row([parts[0], other]), Format.MESSAGES)


# ---------------------------------------------------------------- what is not to be learned
OFF = [("weight", 0), ("train", False), ("training", False), ("loss", False), ("loss_weight", 0.0), ("loss_mask", 0)]


def said(name: str, *answers: dict[str, Any]) -> tuple[Format, dict[str, Any]]:
    """A conversation with these answers, in which the user asks `q`."""
    format = Format(name)
    role, text, user, assistant = {
        Format.MESSAGES: ("role", "content", "user", "assistant"), Format.SHAREGPT: ("from", "value", "human", "gpt")}[format]
    turns = [[{role: user, text: "q"}, {role: assistant, text: f"a{number}", **more}] for number, more in enumerate(answers)]
    return format, {format.columns[0]: [message for turn in turns for message in turn]}


@pytest.mark.parametrize("template", [CHATML, MARKED, THINKING], ids=["prefixes", "marks", "apart"])
@pytest.mark.parametrize("name", ["messages", "sharegpt"])
@pytest.mark.parametrize(("key", "off"), OFF, ids=str)
def test_only_answers_that_the_row_does_not_exclude_are_learned(key: str, off: Any, name: str, template: str) -> None:
    """Whatever others are excluded, an answer that is left is learned after the same tokens."""
    encoder, (format, whole) = ChatEncoder(build(template)), said(name, {}, {}, {}, {})
    everything = encoder.encode(messages_of(whole, format))
    answers = [f"{'<think>' if template is THINKING else ''}a{number}<|im_end|>" for number in range(4)]

    def learned(encoded: Any) -> dict[str, list[int]]:
        """The text of each answer that is learned, and the tokens before it."""
        found, ends = {}, [*(i for i, each in enumerate(encoded.learned) if not each), len(encoded.tokens)]
        for before, after in itertools.pairwise(ends):
            if after > before + 1:
                found[encoder._tokenizer.decode(encoded.tokens[before + 1:after])] = encoded.tokens[:before + 1]
        return found

    expected = {answer: tokens for each in everything for answer, tokens in learned(each).items()}
    assert [*expected] == answers
    for excluded in ({0}, {3}, {1, 2}, {0, 1, 3}):
        format, row = said(name, *({key: off} if number in excluded else {key: None if number == 2 else type(off)(1)}
                                   for number in range(4)))
        encoded = encoder.encode(messages_of(row, format))
        found = {answer: tokens for each in encoded for answer, tokens in learned(each).items()}
        assert found == {answer: expected[answer] for number, answer in enumerate(answers) if number not in excluded}


@pytest.mark.parametrize(("more", "reason"), [
    ({"weight": 0.5}, r"message 2: weight is 0.5, but must be 1 or true \(learned\), or 0 or false"),
    ({"train": "no"}, "message 2: train is 'no', but must be"), ({"weight": 1, "loss": -1}, "message 2: loss is -1"),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "message 2: train_detail is not empty"),
    ({"weight": 0}, "every message by the assistant that it is not to be learned")], ids=str)
def test_what_cannot_be_left_out_of_an_answer_is_refused(more: dict[str, Any], reason: str) -> None:
    for name in ("messages", "sharegpt"):
        format, row = said(name, more)
        with pytest.raises(MegacompileError, match=reason):
            messages_of(row, format)


@pytest.mark.parametrize(("more", "reason"), [
    ({"label": False}, "label is false, so the answer is one to avoid: add --task kto, or keep only the good"),
    ({"label": "False"}, "label is false"), ({"weight": 0}, "weight is 0, so the row is not to be learned: remove it"),
    ({"train": False}, "train is False, so the row")], ids=str)
def test_a_row_that_is_not_to_be_learned_is_refused_and_one_that_is_is_not(more: dict[str, Any], reason: str) -> None:
    for format, row in (said("messages", {}), said("sharegpt", {}), (Format.ALPACA, {"instruction": "q", "output": "a0"})):
        with pytest.raises(MegacompileError, match=reason):
            messages_of(row | more, format)
        assert messages_of(row | {"label": True, "weight": 1, "loss": 1.7}, format) == messages_of(row, format)


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


ARGUMENTS = '{"city": "Paris, \\"ville\\"", "km": 1.10, "none": null}'
#: How templates write a call's arguments, and whether that is the text as it was in the row.
WRITTEN = {"added": ("{{ 'get ' + c.function.arguments }}", True), "joined": ("{{ 'get ' ~ c.function.arguments }}", True),
           "printed": ("get {{ c.function.arguments }}", True), "as JSON": ("get {{ c.function.arguments | tojson }}", False),
           "either": ("get {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}",
                      False)}


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("given", ["text", "object"])
def test_arguments_of_calls_are_json_however_the_template_writes_them(how: str, given: str) -> None:
    """A tool's result may have the form in which Python writes them."""
    written, as_it_was = WRITTEN[how]
    tokenizer = build("{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
                      f"{written}{{% endfor %}}<|im_end|>{{% endfor %}}"
                      "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}")
    arguments = ARGUMENTS if given == "text" else json.loads(ARGUMENTS)
    call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                        {"role": "tool", "content": str(json.loads(ARGUMENTS))}, BYE]}
    (text,) = shown(tokenizer, messages_of(row, Format.MESSAGES))
    assert json.loads(text.split("[get ")[1].split("<|im_end|>]")[0]) == json.loads(ARGUMENTS)
    if as_it_was and given == "text":
        native = tokenizer.apply_chat_template([USER, HELLO | {"content": "", "tool_calls": [call]}], tokenize=False)
        assert native in text.replace("[", "").replace("]", "")


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


@pytest.mark.parametrize("around", ["<s> $A", "<s> $A </s>", "<s> <lang> $A", "$A </s>", "$A"])
def test_a_conversation_without_a_template_begins_as_texts_do_once(around: str) -> None:
    tokenizer = build(template=None, around=around)
    before = tokenizer.convert_tokens_to_ids(around.split("$A")[0].split())
    (encoded,) = ChatEncoder(tokenizer).encode(LONG)
    assert encoded.tokens[:len(before)] == before == tokenizer("be brief")["input_ids"][:len(before)]
    assert not {*before, tokenizer.convert_tokens_to_ids("</s>")} & {*encoded.tokens[len(before):]}
    assert tokenizer.decode(encoded.tokens[len(before):]).startswith("be brief") and not any(encoded.learned[:len(before)])
    prompt = tokenizer.apply_chat_template(LONG[:2], add_generation_prompt=True)["input_ids"]
    assert encoded.tokens[:len(prompt)] == prompt, "the template that is saved with the tokenizer begins otherwise"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_what_a_template_writes_before_conversations_is_not_doubled(template: str) -> None:
    tokenizer = build("{{ bos_token }}" + template, around="<s> $A")
    (encoded,) = ChatEncoder(tokenizer).encode(LONG)
    assert encoded.tokens == tokenizer.apply_chat_template(LONG)["input_ids"]
    assert encoded.tokens.count(tokenizer.bos_token_id) == 1 == encoded.tokens[:1].count(tokenizer.bos_token_id)


# ---------------------------------------------------------------- many answers
def conversation(answers: int, seed: int = 0) -> list[dict[str, Any]]:
    """Turns of uneven length, some with calls of tools."""
    random_ = random.Random(seed)
    found = [{"role": "system", "content": "be brief"}]
    for _ in range(answers):
        texts = ["".join(random_.choices("ab \n", k=random_.randint(1, 9))) for _ in range(2)]
        found += [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    return found


class Counting:
    """A tokenizer that counts the messages that it renders and the characters that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.rendered, self.encoded = tokenizer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.encoded += len(text)
        return self._tokenizer(text, **options)

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        self.rendered += len(messages)
        return self._tokenizer.apply_chat_template(messages, **options)


@pytest.mark.parametrize("template", [CHATML, MARKED, ALTERNATING, DEMANDING + CHATML])
def test_twice_the_turns_take_twice_the_work(template: str) -> None:
    def work(answers: int) -> tuple[int, int]:
        counting = Counting(build(template))
        assert len(ChatEncoder(counting).encode(conversation(answers))) == 1
        return counting.rendered, counting.encoded

    for more, less in zip(work(80), work(40), strict=True):
        assert more <= 2.2 * less


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, THINKING, DEMANDING + CHATML, None],
                         ids=["ChatML", "alternating", "thinking", "demanding", "plain"])
@pytest.mark.parametrize("seed", range(3))
def test_each_answer_is_learned_after_the_prompt_of_generation(template: str | None, seed: int) -> None:
    """Two line ends are one token, so some prompts end in the middle of a token of the whole text."""
    tokenizer, messages = build(template, merges=(("\u010a", "\u010a"),)), conversation(6, seed)
    sequences = ChatEncoder(tokenizer).encode(messages)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:number], add_generation_prompt=True)["input_ids"]
            (found,) = [each for each in sequences if each.tokens[:len(prompt)] == prompt and any(
                each.learned[len(prompt):len(prompt) + 1])]
            end = [*found.learned, False].index(False, len(prompt))
            assert tokenizer.decode(found.tokens[len(prompt):end]) == (
                f"{'<think>' if template is THINKING else ''}{message['content']}<|im_end|>")
    assert sum(sum(each.learned) for each in sequences) == sum(
        len(tokenizer(message["content"])["input_ids"]) + 1 + (7 if template is THINKING else 0)
        for message in messages if message["role"] == "assistant")


def test_an_answer_before_any_user_is_learned_if_the_template_renders_it_as_others() -> None:
    """It is no prompt of this template, which demands that a user speaks."""
    greeting = [LONG[0], {"role": "assistant", "content": "welcome"}, USER, HELLO]
    with pytest.raises(Exception, match="no user"):
        build(DEMANDING + CHATML).apply_chat_template(greeting[:2])
    assert shown(build(DEMANDING + CHATML), greeting) == shown(build(CHATML), greeting) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>assistant\n[welcome<|im_end|>]\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n[hello<|im_end|>]\n"]
    encoder = ChatEncoder(build(DEMANDING + THINKING))
    (encoded,) = encoder.encode(greeting)
    assert encoder.unasked == 1 and sum(encoded.learned) == len("<think>hello") + 1
    with pytest.raises(MegacompileError, match="no user"):
        encoder.encode(greeting[:2])


def test_a_tokenizer_that_cannot_end_an_answer_is_refused() -> None:
    with pytest.raises(MegacompileError, match="neither a chat template nor an end-of-sequence token: set"):
        ChatEncoder(build(template=None, end=None))
