"""Models leave as other tools read them: adapters merged, GGUF files that give the same logits and texts, uploads."""
from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megacompile import exporting
from megacompile.errors import ArgumentError, CheckpointError, MegacompileError, UnsupportedError

pytest.importorskip("gguf")

VOCABULARY = 300
PROMPT = "Numbers 1234 and words, 12 of them"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    # Widths are the defaults of the class, which is all that transformers reads from GGUF files.
    "qwen3": ("qwen3", dict(head_dim=128)),
    "qwen3moe": ("qwen3_moe", dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=768, norm_topk_prob=True)),
    "llama, tied": ("llama", dict(tie_word_embeddings=True)),
    "llama, long": ("llama", dict(rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64))),
    "mistral": ("mistral", dict(sliding_window=None)),
}


def tokenizer(*steps: Any) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps]) if len(steps) > 1 else steps[0]
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([PROMPT] * 3, trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="</s>")


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def saved(folder: Path, family: str, splitting: Any = GPT2) -> Any:
    """A tiny random model, saved with a tokenizer. Its weights are numbers that float16 holds."""
    torch.manual_seed(0)
    kind, fields = FAMILIES[family]
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | fields)))
    for p in model.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)
        p.data = p.data.half().float()
    model.save_pretrained(folder)
    tokenizer(splitting).save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_has_the_models_logits(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "run" / "model", family)
    ids = torch.randint(2, VOCABULARY, (2, 100), generator=torch.Generator().manual_seed(0))
    for kind, bound in (("f16", 1e-5), ("q8_0", 0.2)):
        exporting.export_gguf(exporting.model_folder(tmp_path / "run"), tmp_path / "model.gguf", kind)
        read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
        if family == "llama, long":  # transformers reads no factors of positions from such files
            read.model.rotary_emb = model.model.rotary_emb
        for name, module in read.named_modules():  # nor whether weights of experts are normalized
            if name.endswith("mlp.gate"):
                module.norm_topk_prob = True
        with torch.no_grad():
            exact, found = model(ids).logits, read(ids).logits
        assert (found - exact).norm() <= bound * exact.norm()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "run"]


@pytest.mark.skipif(shutil.which("llama-simple") is None, reason="needs llama-simple, an example of llama.cpp, on the path")
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_continues_a_text_as_the_model_does(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    words = AutoTokenizer.from_pretrained(tmp_path)
    exporting.export_gguf(tmp_path, tmp_path / "model.gguf", "f16")
    ids = words(PROMPT, return_tensors="pt").input_ids
    expected = words.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0]).replace("\0", "")  # it prints no zeros
    found = subprocess.run(["llama-simple", "-m", tmp_path / "model.gguf", "-n", "16", PROMPT], capture_output=True, check=True)
    assert expected in found.stdout.decode("utf-8", "replace")


@pytest.mark.parametrize(("steps", "name"), [
    ((GPT2,), "gpt-2"), ((pre_tokenizers.Digits(individual_digits=True), GPT2), "smollm"),
    *(((pre_tokenizers.Split(Regex(split[0]), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
       name) for split, name in exporting.SPLITS.items() if name in ("llama-bpe", "qwen2"))])
def test_a_splitting_of_texts_has_the_name_that_llama_cpp_gives_it(steps: Any, name: str) -> None:
    found = json.loads(tokenizer(*steps).backend_tokenizer.to_str())
    assert exporting.SPLITS[exporting.split_of(found["pre_tokenizer"])] == name


def test_a_gguf_file_has_the_vocabulary_and_its_special_tokens(tmp_path: Path) -> None:
    from gguf import GGUFReader, TokenType

    saved(tmp_path, "llama, tied")
    words = AutoTokenizer.from_pretrained(tmp_path)
    exporting.export_gguf(tmp_path, tmp_path / "model.gguf", "f16")
    fields = {name.removeprefix("tokenizer.ggml."): field.contents()
              for name, field in GGUFReader(tmp_path / "model.gguf").fields.items()}
    tokens, kinds = fields["tokens"], fields["token_type"]
    assert tokens[:len(words)] == words.convert_ids_to_tokens(range(len(words))) and tokens[-1] == f"[PAD{VOCABULARY - 1}]"
    assert kinds[0] == kinds[1] == TokenType.CONTROL and kinds[2] == TokenType.NORMAL and kinds[-1] == TokenType.UNUSED
    assert (fields["bos_token_id"], fields["eos_token_id"]) == (words.bos_token_id, words.eos_token_id)
    assert fields["add_bos_token"] == (words("a")["input_ids"][0] == words.bos_token_id)


def test_long_positions_have_the_frequencies_of_transformers() -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=2, **FAMILIES["llama, long"][1])
    scaled = LlamaRotaryEmbedding(config).inv_freq
    plain = 1 / 5e5 ** (torch.arange(0, 32, 2) / 32)
    assert torch.allclose(plain / exporting.llama3_factors(config.to_dict(), config.rope_parameters), scaled, rtol=1e-5)


def test_what_cannot_be_exported_is_refused_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="has no model: give the folder of a run"):
        exporting.model_folder(tmp_path)
    model, output = tmp_path / "model", tmp_path / "model.gguf"
    saved(model, "llama, tied", pre_tokenizers.ByteLevel(add_prefix_space=True))
    with pytest.raises(UnsupportedError, match=r"this tokenizer cannot be exported here, .*convert_hf_to_gguf\.py"):
        exporting.export_gguf(model, output, "f16")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ArgumentError, match=r"has no tokenizer\.json, .*: save the tokenizer there"):
        exporting.export_gguf(model, output, "f16")
    tokenizer(GPT2).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    moe = dict(architectures=["Qwen3MoeForCausalLM"])
    for fields, words in ((moe, "llama.cpp divides the weights of a token's experts by their sum, and this model does not"),
                          (dict(architectures=["GptOssForCausalLM"]), "GptOssForCausalLM cannot be exported here, only "),
                          (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), "positions of the kind yarn cannot")):
        (model / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(UnsupportedError, match=words):
            exporting.export_gguf(model, output, "f16")
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match="has no weights in safetensors files: save the model with save_pretrained"):
        exporting.export_gguf(model, output, "f16")
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ArgumentError, match="is an adapter: merge it first, with megacompile merge"):
        exporting.export_gguf(model, output, "f16")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MegacompileError, match="a GGUF file needs the package gguf: run pip install gguf"):
        exporting.export_gguf(model, output, "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_merged_adapter_is_an_ordinary_model_with_the_adapted_logits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = saved(tmp_path / "base", "qwen3")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
    exporting.merge(str(tmp_path / "base"), tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert (merged(ids).logits - expected).norm() <= 1e-5 * expected.norm()
    exporting.export_gguf(tmp_path / "merged", tmp_path / "merged.gguf", "f16")  # its tokenizer is there too
    saved(tmp_path / "other", "llama, tied")
    with pytest.raises(CheckpointError, match=r"does not fit .*other: give the model that it was trained on"):
        exporting.merge(str(tmp_path / "other"), tmp_path / "adapter", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_an_upload_that_the_hub_refuses_says_how_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    class Hub:
        calls: ClassVar[list[Any]] = []

        def create_repo(self, repository: str, exist_ok: bool) -> str:
            self.calls.append((repository, exist_ok))
            return f"https://hub/{repository}"

        def upload_folder(self, repo_id: str, folder_path: str) -> None:
            if self.calls[-1] == ("me/refused", True):
                raise huggingface_hub.errors.LocalTokenNotFoundError("no token")
            self.calls.append((repo_id, folder_path))

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert exporting.upload(tmp_path, "me/model") == "https://hub/me/model" and Hub.calls[-1] == ("me/model", str(tmp_path))
    with pytest.raises(MegacompileError, match="was not uploaded to me/refused: log in with hf auth login, and upload it with"):
        exporting.upload(tmp_path, "me/refused")
