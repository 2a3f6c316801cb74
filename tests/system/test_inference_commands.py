"""`megacompile generate`, `chat` and `evaluate`: the answers and losses of the plain model, in the user's order, from the files
that people have."""
from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer
import torch
from tiny_models import build
from transformers import AutoModelForCausalLM, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from typer.testing import CliRunner, Result

import megacompile
from megacompile import cli
from megacompile.errors import MegacompileError
from megacompile.inference.answers import PromptEncoder, Sampling, chat
from megacompile.inference.opening import Opening
from megacompile.streaming.streamed import Streamed

ASKED = ["one", "a longer question than the others", "two words", "x", "and one more of them"]
GREEDY = ("--temperature", 0, "--max-new-tokens", 5, "--device", "cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer.build()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A saved model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    build(vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the model whose weights matter."""
    import peft

    folder = tmp_path_factory.mktemp("adapter")
    plain = AutoModelForCausalLM.from_pretrained(model)
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "id": number}) + "\n" for number, text in enumerate(ASKED)))
    return path


def command(*arguments: object, **how: Any) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **how)


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def answer(plain: Any, tokenizer: Any, ids: list[int], count: int = 5) -> tuple[str, int]:
    """Greedily, alone, by transformers."""
    with torch.no_grad():
        found = plain.generate(input_ids=torch.tensor([ids]), max_new_tokens=count, do_sample=False,
                               pad_token_id=0)[0, len(ids):]
    return tokenizer.decode(found, skip_special_tokens=True), len(found)


def chatted(tokenizer: Any, *messages: tuple[str, str]) -> list[int]:
    return list(tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages],
                                              add_generation_prompt=True, return_dict=True)["input_ids"])


# ---------------------------------------------------------------- generate
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.nightly), 2, 64])
def test_answers_are_those_of_the_plain_model_in_the_order_of_the_file(
        batch: int, model: Path, tokenizer: Any, prompts: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    found = rows(command("generate", model, "--prompts", prompts, "--batch", batch, *GREEDY))
    assert [(row["id"], row["prompt"]) for row in found] == [*enumerate(ASKED)]
    assert [(row["completion"], row["tokens"]) for row in found] == [
        answer(plain, tokenizer, chatted(tokenizer, ("user", text))) for text in ASKED]


@pytest.mark.parametrize("through", ["option", pytest.param("folder", marks=pytest.mark.nightly)])
def test_an_adapter_answers_with_its_model(through: str, model: Path, adapter: Path, tokenizer: Any, prompts: Path) -> None:
    import peft

    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    source: tuple[object, ...] = (model, "--adapter", adapter) if through == "option" else (adapter,)
    found = rows(command("generate", *source, "--prompts", prompts, *GREEDY))
    expected = [answer(plain, tokenizer, chatted(tokenizer, ("user", text)))[0] for text in ASKED]
    assert [row["completion"] for row in found] == expected
    assert expected != [row["completion"] for row in rows(command("generate", model, "--prompts", prompts, *GREEDY))]


def test_prompts_are_taken_as_people_write_them(model: Path, tokenizer: Any, tmp_path: Path) -> None:
    encoder = PromptEncoder(tokenizer, raw=False)
    user = chatted(tokenizer, ("user", "hello"))
    for row in ({"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}, {"instruction": "hello"},
                {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "left out"}]},
                {"prompt": [{"role": "user", "content": "hello"}]}):
        assert encoder.encode(row) == user, row
    shared = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "left out"}]
    assert encoder.encode({"conversations": shared}) == user
    assert encoder.encode({"prompt": "hello", "system": "brief"}) == chatted(tokenizer, ("system", "brief"), ("user", "hello"))
    assert encoder.encode({"instruction": "add", "input": "1"}) == chatted(tokenizer, ("user", "add\n\n1"))
    assert PromptEncoder(tokenizer, raw=True).encode({"prompt": "hello"}) == tokenizer("hello")["input_ids"]
    lines = tmp_path / "lines.txt"
    lines.write_text("hello\n\none\n")
    assert [prompt.tokens for prompt in encoder.read(str(lines))] == [user, chatted(tokenizer, ("user", "one"))]


@pytest.mark.parametrize("around", ["<s> $A", "<s> $A </s>", "$A </s>"])
def test_prompts_begin_as_texts_do_once_and_do_not_end_as_texts_do(around: str) -> None:
    tokenizer = tiny_tokenizer.build(None, around=around)
    before, inside = tokenizer.convert_tokens_to_ids(around.split("$A")[0].split()), [*range(7, 11)]
    text = tokenizer.decode(inside)
    for prompt in (text, "<s>" * len(before) + text):
        assert PromptEncoder(tokenizer, raw=False).encode({"prompt": prompt}) == [*before, *inside]
    tokenizer.chat_template = "{{ bos_token }}" + tiny_tokenizer.CHATML
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    for encoded in (PromptEncoder(tokenizer, raw=False).encode({"prompt": "x"}),
                    PromptEncoder(tokenizer, raw=True).encode({"prompt": rendered})):
        assert encoded == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_tools_and_calls_of_a_prompt_are_told_and_marks_of_what_is_learned_are_not(tokenizer: Any) -> None:
    asked, tool = [{"role": "user", "content": "x"}], {"name": "add"}
    marking = copy.deepcopy(tokenizer)
    marking.chat_template = "{% for m in messages %}{{ m.content }}{{ m.keys() | join(',') }}{% endfor %}"
    row = {"messages": [asked[0], {"role": "assistant", "content": "y", "train": False}, asked[0]]}
    assert "train" not in tokenizer.decode(PromptEncoder(marking, raw=False).encode(row))
    told = copy.deepcopy(tokenizer)
    told.chat_template = tiny_tokenizer.TOOLS
    assert PromptEncoder(told, raw=False).encode({"messages": asked, "tools": json.dumps([tool])}) == (
        told.apply_chat_template(asked, tools=[tool], add_generation_prompt=True)["input_ids"])
    with pytest.raises(MegacompileError, match="the chat template ignores tools"):
        PromptEncoder(tokenizer, raw=False).encode({"messages": asked, "tools": [tool]})


def test_a_stop_text_ends_an_answer_and_is_left_out(model: Path, tokenizer: Any, tmp_path: Path) -> None:
    prompt = tmp_path / "one.jsonl"
    prompt.write_text(json.dumps({"prompt": "one"}) + "\n")
    whole = rows(command("generate", model, "--prompts", prompt, *GREEDY[:2], "--max-new-tokens", 30, "--device", "cpu"))[0]
    stop = whole["completion"][3:5]
    assert stop
    found = rows(command("generate", model, "--prompts", prompt, *GREEDY[:2], "--max-new-tokens", 30, "--device", "cpu",
                         "--stop", stop))[0]
    assert found["completion"] == whole["completion"][:whole["completion"].index(stop)]


def test_the_same_seed_gives_the_same_samples(model: Path, prompts: Path) -> None:
    found = [[row["completion"] for row in rows(command("generate", model, "--prompts", prompts, "--temperature", 1.5,
                                                        "--max-new-tokens", 5, "--device", "cpu", "--seed", seed))]
             for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_a_row_without_a_prompt_is_refused_before_the_first_answer(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    with prompts.open("a") as file:
        file.write(json.dumps({"answer": "?"}) + "\n")
    result = command("generate", model, "--prompts", prompts, "--output", output, *GREEDY)
    assert result.exit_code == cli.EXIT_FAILED and not output.exists()
    assert "row 6: the row has no prompt: give it a column prompt" in result.stderr


def test_what_is_there_is_not_overwritten(model: Path, prompts: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text("kept")
    result = command("generate", model, "--prompts", prompts, "--output", output, *GREEDY)
    assert "exists: give another --output, or remove it" in result.stderr and output.read_text() == "kept"
    result = command("generate", model, "--prompts", prompts, "--output", tmp_path / "none" / "answers.jsonl", *GREEDY)
    assert "cannot be written (No such file or directory): give another --output" in result.stderr


def test_models_that_cannot_answer_are_refused(
        model: Path, adapter: Path, tokenizer: Any, prompts: Path, tmp_path: Path) -> None:
    def refused(*arguments: object) -> str:
        result = command("generate", *arguments, "--prompts", prompts, *GREEDY)
        assert result.exit_code != 0 and isinstance(result.exception, SystemExit), result.output
        return result.stderr

    build().save_pretrained(bare := tmp_path / "bare")
    assert "has no tokenizer: give --tokenizer" in refused(bare)
    tokenizer.save_pretrained(empty := tmp_path / "empty")
    (empty / "config.json").write_bytes((model / "config.json").read_bytes())
    assert "has no weights, only a config: give a model that was trained" in refused(empty)
    assert "is an adapter: give its model, or leave --adapter out" in refused(adapter, "--adapter", adapter)
    assert "PEFT cannot read an adapter from" in refused(model, "--adapter", model)
    nameless = tmp_path / "nameless"
    shutil.copytree(adapter, nameless)
    settings = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": None}))
    assert "does not say which model it adapts: give the model, and --adapter" in refused(nameless)
    build(vocab_size=len(tokenizer), num_hidden_layers=4).save_pretrained(other := tmp_path / "other")
    tokenizer.save_pretrained(other)
    assert "does not fit the model" in refused(other, "--adapter", adapter)


def test_prompts_that_are_none_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    encoder = PromptEncoder(tokenizer, raw=True)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(MegacompileError, match=r"has no prompts: write one in each line"):
        list(encoder.read(str(tmp_path / "empty.txt")))
    (tmp_path / "bytes.txt").write_bytes(b"hello\n\xff\xfe\n")
    with pytest.raises(MegacompileError, match=r"bytes.txt, row 2 cannot be read"):
        list(encoder.read(str(tmp_path / "bytes.txt")))
    with pytest.raises(MegacompileError, match=r"the prompt is empty: write some text, or remove the row"):
        encoder.encode({"prompt": ""})
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('only the user speaks') }}"
    with pytest.raises(MegacompileError, match=r"the chat template refuses the conversation"):
        PromptEncoder(strict, raw=False).encode({"prompt": "hello"})
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    with pytest.raises(MegacompileError, match=r"the tokenizer has no chat template: give prompts as text"):
        PromptEncoder(plain, raw=False).encode({"messages": [{"role": "user", "content": "hello"}]})


def test_ctrl_c_leaves_whole_lines(model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megacompile.inference import answers

    answered, calls = answers.answered, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answered(*arguments)

    monkeypatch.setattr(answers, "answered", interrupted)
    monkeypatch.setattr(answers, "_WINDOW", 1)
    result = command("generate", model, "--prompts", prompts, "--batch", 2, "--output", tmp_path / "out.jsonl", *GREEDY)
    assert result.exit_code == cli.EXIT_INTERRUPTED
    assert [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


# ---------------------------------------------------------------- chat
def conversation(model: Path, tokenizer: Any, *said: str, system: str | None = None, **more: Any) -> str:
    """What is printed when a user says this."""
    streamed = megacompile.from_pretrained(model, trainable=False, device="cpu")
    texts, printed = iter(said), []

    def ask() -> str:
        try:
            return next(texts)
        except StopIteration:
            raise EOFError from None

    chat(streamed, tokenizer, Sampling(max_new_tokens=5, temperature=0, **more), system, ask, printed.append)
    streamed.megacompile.close()
    return "".join(printed).partition("\n")[2]


def test_a_conversation_goes_on_from_its_answers_until_it_is_reset(model: Path, tokenizer: Any) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    first = answer(plain, tokenizer, chatted(tokenizer, ("system", "be brief"), ("user", "one")))[0]
    second = answer(plain, tokenizer, chatted(tokenizer, ("system", "be brief"), ("user", "one"), ("assistant", first),
                                              ("user", "two")))[0]
    said = conversation(model, tokenizer, "one", "", "two", "/reset", "one", "/exit", "never", system="be brief")
    assert said == f"{first}\n{second}\n{first}\n"


def test_a_stop_text_is_neither_said_nor_remembered(model: Path, tokenizer: Any) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model)
    whole = answer(plain, tokenizer, chatted(tokenizer, ("user", "one")))[0]
    stop = whole[2:5]
    kept = whole[:whole.index(stop)]
    second = answer(plain, tokenizer, chatted(tokenizer, ("user", "one"), ("assistant", kept), ("user", "two")))[0]
    said = conversation(model, tokenizer, "one", "two", stop=[stop])
    assert said == f"{kept}\n{second.partition(stop)[0]}\n"


def test_an_answer_that_the_model_has_no_positions_for_is_refused_before_weights_are_loaded(
        model: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, long = tmp_path / "prompts.txt", "one two " * 12
    path.write_text(f"one\n{long}\n")
    arguments = ("generate", model, "--prompts", path, "--raw", "--max-new-tokens")
    left = 256 - len(tokenizer(long)["input_ids"]) + 1  # an answer's last token needs none
    rows(command(*arguments, left, "--temperature", 0, "--device", "cpu"))
    monkeypatch.setattr(Opening, "open_model", None)
    result = command(*arguments, left + 1)
    said = f"row 2: the prompt has {257 - left} tokens and leaves {left} of the model's positions, but --max-new-tokens is "
    assert result.exit_code == 1 and f"{said}{left + 1}: give {left} or less" in result.stderr
    path.write_text(long * 30)
    result = command(*arguments, 1)
    assert result.exit_code == 1 and "more than the 256 positions of the model: shorten it" in result.stderr


@pytest.mark.nightly(held_by=(
    "tests/system/test_inference_commands.py::test_answers_are_those_of_the_plain_model_in_the_order_of_the_file",))
def test_a_model_that_takes_images_answers_text(tokenizer: Any, tmp_path: Path) -> None:
    """Transformers does not open it as a causal language model."""
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2)
    text = LlamaConfig(vocab_size=len(tokenizer) + 1, num_hidden_layers=2, max_position_embeddings=256, **sizes)
    vision = CLIPVisionConfig(num_hidden_layers=1, image_size=28, patch_size=14, **sizes)
    config = LlavaConfig(vision_config=vision.to_dict(), text_config=text.to_dict(), image_token_index=len(tokenizer))
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\n")
    (found,) = rows(command("generate", tmp_path, "--prompts", tmp_path / "prompts.txt", "--raw", *GREEDY))
    assert 0 < found["tokens"] <= 5


def test_by_default_an_answer_takes_what_the_positions_leave(model: Path, tokenizer: Any, tmp_path: Path) -> None:
    path, plain = tmp_path / "prompts.txt", AutoModelForCausalLM.from_pretrained(model)
    plain.generation_config.eos_token_id = None
    path.write_text("one two " * 12)
    ids = tokenizer("one two " * 12)["input_ids"]
    (found,) = rows(command("generate", model, "--prompts", path, "--raw", "--temperature", 0, "--device", "cpu"))
    whole = answer(plain, tokenizer, ids, 256 - len(ids) + 1)[0]
    assert 0 < found["tokens"] <= 256 - len(ids) + 1 < 256 and whole.startswith(found["completion"])


def test_a_conversation_that_has_become_too_long_says_so_and_goes_on(model: Path, tokenizer: Any) -> None:
    long = "one two " * 200
    said = conversation(model, tokenizer, long, "one", long, "/reset", "one")
    at_first, first, later, again = said.splitlines()
    assert first == again and at_first.endswith("positions of the model: shorten it")
    assert later.endswith("positions of the model: shorten it, or forget the conversation with /reset")


@pytest.mark.parametrize("stops", [["END"], ["lo", "w E"], []])
def test_text_is_said_once_it_cannot_begin_a_stop_text(stops: list[str]) -> None:
    sampling = Sampling(stop=stops)
    text = "Eels slow END and on"
    said = [sampling.known(text[:end]) for end in range(len(text) + 1)]
    assert all(after.startswith(before) for before, after in itertools.pairwise(said))
    assert said[-1] == sampling.cut(text) and said[len("Eels s")] == "Eels s"


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
        model: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = type(build()).generate, []

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        if len(calls) == 1:
            kwargs["streamer"].put(torch.tensor([[1]]))  # the prompt
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(build()), "generate", interrupted)
    said = conversation(model, tokenizer, "one", "two")
    assert len(calls) == 2 and said.count("\n") == 2


# ---------------------------------------------------------------- evaluate
@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return path


@pytest.mark.parametrize("batch", [1, 3])
def test_the_loss_of_a_text_is_that_of_the_plain_model(batch: int, model: Path, tokenizer: Any, text: Path) -> None:
    result = command("evaluate", model, "--data", text, "--length", 32, "--batch", batch, "--device", "cpu")
    assert result.exit_code == 0, result.output
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    whole = ids[:len(ids) // 32 * 32].view(-1, 32)
    plain = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        losses = [float(plain(input_ids=row[None], labels=row[None]).loss) for row in whole]
    words = result.stdout.split()
    assert float(words[1].rstrip(",")) == pytest.approx(sum(losses) / len(losses), abs=2e-4)
    assert float(words[3].rstrip(",")) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert int(words[5].replace(",", "")) == 31 * len(whole)


@pytest.mark.nightly(held_by=(
    "tests/system/test_inference_commands.py::test_prompts_begin_as_texts_do_once_and_do_not_end_as_texts_do",
    "tests/system/test_inference_commands.py::test_the_loss_of_a_text_is_that_of_the_plain_model"))
def test_base_models_that_begin_texts_with_a_token_are_evaluated_and_continued_with_it(
        model: Path, text: Path, tmp_path: Path) -> None:
    """The tokenizer has no chat template."""
    tokenizer = tiny_tokenizer.build(None, around="<s> $A")
    folder = tmp_path / "base"
    build(vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    plain, bos = AutoModelForCausalLM.from_pretrained(folder), tokenizer.bos_token_id

    def measured(data: Path) -> float:
        result = command("evaluate", folder, "--data", data, "--length", 128, "--batch", 3, "--device", "cpu")
        assert result.exit_code == 0, result.output
        return float(result.stdout.split()[1].rstrip(","))

    def native(asked: list[int], answer: list[int]) -> tuple[float, int]:
        ids, labels = torch.tensor([[*asked, *answer]]), torch.tensor([[-100] * len(asked) + answer])
        with torch.no_grad():
            return float(plain(input_ids=ids, labels=labels).loss) * len(answer), len(answer)

    ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
    losses = [native([bos], ids[start:start + 127]) for start in range(0, len(ids) - 126, 127)]
    assert measured(text) == pytest.approx(sum(nats for nats, _ in losses) / sum(count for _, count in losses), abs=2e-4)

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"instruction": asked, "output": said}) + "\n" for asked, said in UNEVEN))
    losses = [native(tokenizer(f"### User:\n{asked}\n\n### Assistant:\n")["input_ids"],
                     tokenizer(f"{said}<|im_end|>", add_special_tokens=False)["input_ids"]) for asked, said in UNEVEN]
    assert measured(path) == pytest.approx(sum(nats for nats, _ in losses) / sum(count for _, count in losses), abs=2e-4)

    path.write_text("".join(json.dumps({"prompt": asked}) + "\n" for asked, _ in UNEVEN))
    found = rows(command("generate", folder, "--prompts", path, *GREEDY))
    assert [row["completion"] for row in found] == [
        answer(plain, tokenizer, tokenizer(asked)["input_ids"])[0] for asked, _ in UNEVEN]
    assert tokenizer("x")["input_ids"][0] == bos


UNEVEN = [("one", "a"), ("two words", "an answer that is much longer than all of the others are, by far, and goes on"),
          ("x", "yes"), ("a longer question than the others", "no"), ("and one more of them", "perhaps it is so"), ("why", "z")]


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.nightly), 4, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_loss_of_uneven_conversations_is_the_mean_over_tokens_of_the_plain_models_rows(
        batch: int, model: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens of answers count, and their ends. Packed rows have fewer positions than rows that are padded."""
    computed, original = list[int](), Streamed._batch

    def counted(self: Streamed, *arguments: Any) -> Any:
        made = original(self, *arguments)
        computed.append(made.computed_tokens)
        return made

    monkeypatch.setattr(Streamed, "_batch", counted)
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": asked}, {"role": "assistant", "content": said}]}) + "\n" for asked, said in UNEVEN))
    result = command("evaluate", model, "--data", path, "--length", 128, "--batch", batch, "--device", "cpu")
    assert result.exit_code == 0, result.output

    plain, lengths, nats, count = AutoModelForCausalLM.from_pretrained(model), list[int](), 0.0, 0
    for asked, said in UNEVEN:
        ids, begin = chatted(tokenizer, ("user", asked), ("assistant", said)), len(chatted(tokenizer, ("user", asked)))
        ids = ids[:ids.index(tokenizer.eos_token_id, begin) + 1]  # what the template adds after the end is no answer
        labels = [-100] * begin + ids[begin:]
        with torch.no_grad():
            mean = float(plain(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss)
        lengths.append(len(ids))
        nats, count = nats + mean * (len(ids) - begin), count + len(ids) - begin
    words = result.stdout.split()
    assert float(words[1].rstrip(",")) == pytest.approx(nats / count, abs=2e-4)
    assert float(words[3].rstrip(",")) == pytest.approx(math.exp(nats / count), rel=1e-3)
    assert int(words[5].replace(",", "")) == count
    batches = [lengths[start:start + batch] for start in range(0, len(lengths), batch)]
    padded = sum(len(each) * max(each) for each in batches)
    assert sum(lengths) <= sum(computed) and (batch == 1 or sum(computed) < padded)


def test_data_that_cannot_be_read_is_refused_before_weights_are_loaded(
        model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacompile.loading.from_pretrained", None)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "?"}) + "\n")
    result = command("evaluate", model, "--data", tmp_path / "rows.jsonl", "--length", 32, "--device", "cpu")
    assert result.exit_code == cli.EXIT_FAILED and "the columns question fit no format" in result.stderr


def test_the_length_is_by_default_the_number_of_positions_of_a_model_that_has_few(model: Path, text: Path) -> None:
    shown = [command("evaluate", model, "--data", text, *more, "--device", "cpu").stdout for more in ([], ["--length", 256])]
    assert shown[0].split("(")[0] == shown[1].split("(")[0] != ""


def test_a_length_that_the_model_does_not_have_is_refused(model: Path, text: Path) -> None:
    result = command("evaluate", model, "--data", text, "--length", 512, "--device", "cpu")
    assert result.exit_code != 0 and "512" in result.stderr and "Traceback" not in result.stderr


# ---------------------------------------------------------------- frozen weights
def test_weights_for_inference_take_their_own_size(model: Path) -> None:
    streamed = megacompile.from_pretrained(model, trainable=False, device="cpu")
    assert not any(p.requires_grad for p in streamed.parameters()) and not streamed.training
    parts = streamed.megacompile.stats["host_parts"]
    assert parts.keys() == {"weights"} and parts["weights"] <= 1.1 * sum(p.nbytes for p in streamed.parameters())
    streamed.megacompile.close()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_an_adapter_is_merged_and_exported_by_two_commands(model: Path, adapter: Path, tmp_path: Path) -> None:
    """The folder of a run stands for the adapter in it. `peft.save_pretrained` wrote the model's folder as its base."""
    run_folder = tmp_path / "run"
    shutil.copytree(adapter, run_folder / "model")
    merged = command("merge", run_folder, "--output", tmp_path / "merged")
    assert merged.exit_code == 0 and merged.stdout.splitlines()[-1] == f"saved in {tmp_path / 'merged'}"
    refused = command("merge", tmp_path / "merged", "--output", tmp_path / "again")
    assert refused.exit_code == 2 and "is not an adapter: give the folder of one" in refused.stderr
    pytest.importorskip("gguf")
    exported = command("export", tmp_path / "merged", "--gguf", tmp_path / "model.gguf", "--type", "q8_0")
    assert exported.exit_code == 0, exported.stderr
    assert exported.stdout == f"saved in {tmp_path / 'model.gguf'}\n" and (tmp_path / "model.gguf").stat().st_size > 1000
    refused = command("export", run_folder, "--gguf", tmp_path / "never.gguf")
    assert refused.exit_code == 2 and "is an adapter: merge it first, with megacompile merge" in refused.stderr
    assert command("merge", run_folder, "--output", tmp_path / "x", "--type", "f16").exit_code == 2
