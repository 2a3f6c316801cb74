"""Every causal language model of transformers streams exactly or is refused with a reason, as docs/families.md says."""
from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import verdicts
from make_families import PAGE, README, counts, page, read_rows
from tiny_configs import NOT_ALONE, classes, tiny_config
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from verdicts import Verdict, judge, judge_compiled, judge_each, predicted_step

import megacompile

#: Attention in chunks beside full attention, experts in every second layer; attention to chosen tokens; a window that layers
#: get in their mask alone.
FAST = ("llama4_text", "axk2", "qwen2_moe")


def stated_outcome(model_type: str) -> str:
    """That of the page."""
    return {row.model_type: row for row in read_rows().values()}[model_type].outcome


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--nightly")
    exact = [row.model_type for row in read_rows().values() if row.outcome == "exact"]  # those that stream
    built = [model_type for model_type in classes().values() if model_type not in NOT_ALONE]
    changed = ("lfm2", "bamba", "granitemoehybrid", "gemma4_text", "qwen3", *FAST)
    of_all = {"model_type": (classes().values(), FAST), "built_type": (built, changed), "planned_type": (exact, ()),
              "compiled_type": (classes().values(), ()), "keeping_type": (exact, FAST)}
    for name in of_all.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, of_all[name][not everything])


@pytest.fixture
def judged(pytestconfig: pytest.Config) -> Callable[..., Verdict]:
    """`judge`; of many families, each in a process of its own, with a limit of time."""
    def alone(model_type: str, **options: Any) -> Verdict:
        (verdict,) = judge_each([model_type], start="spawn", **options)
        return verdict

    return alone if pytestconfig.getoption("--nightly") else lambda model_type, **options: judge(model_type, options)


#: Patterns for the classes that no tiny config builds -> why.
ELSEWHERE = {
    r"\w+(Vision|Audio|MultiModal|Multimodal|Unfold|VQVAE)\w*|\w+ClippableLinear": "it reads images or sound",
    r"\w+(For[A-Z]\w+|Model|FlexibleLinear|Prompt)": "another model of the same file has it",
    r"\w+(Encoder|EncoderLayer|EncoderAttention|CrossAttention|CrossAttentionDecoderLayer)": "it reads what an encoder gives",
    r"\w+(Pooler|PrecomputedAspectRatioEmbedding|PrecomputedPositionEmbedding)": "another head or an encoder has it",
    r"BigBird(Pegasus)?(BlockSparseAttention|SelfAttention)": "it is refused, or the encoder has it",
    r"AxialPositionEmbeddings": "they take rows of one length",
    r"DogeCDMoE|TrOCRSinusoidalPositionalEmbedding|Cohere2MoeRMSNorm": "an option puts it in another one's place in all layers",
    r"Qwen4ExpText(NGramEmbedding|PLELayer)": "the model is refused because of its indexer",
}
#: Kinds that code names beside those of the config, by model type: the masks of parts of a layer, say.
OTHER_NAMES = {
    **{each: {"full_attention", "sliding_attention", "linear_attention"} for each in ("inkling_text", "inkling2_text")},
    **{each: {"full_attention"} for each in ("dots3_note_text", "zamba", "zamba2")},
    "falcon_h1": {"full_attention", "linear_attention"}, "recurrent_gemma": {"sliding_attention"}, "zaya": {"conv"}}


def read_by(model_class: type) -> dict[str, tuple[type, str]]:
    """The modules of a modeling file that a model's code names, itself or through other such classes, with their code."""
    module = sys.modules[model_class.__module__]
    here = {name: each for name, each in vars(module).items()
            if inspect.isclass(each) and issubclass(each, nn.Module) and each.__module__ == module.__name__}
    found: dict[str, tuple[type, str]] = {}
    waiting = [model_class.__name__]
    while waiting:
        name = waiting.pop()
        if name in here and name not in found:
            found[name] = here[name], inspect.getsource(here[name])
            waiting += set(re.findall(r"\w+", found[name][1])) & here.keys()
    return found


def kinds_in(config: Any) -> dict[str, set[str]]:
    """The kinds of layers that a config lists, by field."""
    computed = {field: getattr(config, field, None) for field in ("layer_types", "mlp_layer_types")}  # by some configs
    return {field: set(found) for field, found in (vars(config) | computed).items() if not field.startswith("_")
            if isinstance(found, list | tuple) and found and all(isinstance(each, str) for each in found)}


def test_a_tiny_config_has_every_kind_of_layer_of_its_family(built_type: str) -> None:
    """Every module that the model's code can build, every kind that this code names, and every kind of the default config."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[built_type]]
    config = tiny_config(built_type)
    with torch.device("meta"):
        built = {each for module in model_class(config).modules() for each in type(module).__mro__}
    code_of = read_by(model_class)
    left_out = [name for name, (each, _) in code_of.items() if each not in built]
    assert not [name for name in left_out if not any(re.fullmatch(pattern, name) for pattern in ELSEWHERE)]

    kinds = kinds_in(config.get_text_config())
    there = kinds.get("layer_types", set()) | kinds.get("mlp_layer_types", set())
    words = re.findall(r"[\"'](\w+)[\"']", "".join(code for _, code in code_of.values()))
    assert not there or set(words) & set(ALLOWED_LAYER_TYPES) <= there | OTHER_NAMES.get(built_type, set())
    for field, default in kinds_in((model_class.config_class or type(config))().get_text_config()).items():
        assert default <= kinds[field]


def test_a_family_has_the_verdict_of_the_page(model_type: str, judged: Callable[..., Verdict]) -> None:
    verdict = judged(model_type)
    assert verdict.outcome == stated_outcome(model_type) != "wrong", verdict.reason


def test_a_window_that_only_the_mask_has_counts() -> None:
    """Layers of a family pass it to attention, know it, or neither."""
    native: Any = verdicts._build("qwen2_moe")
    for layer in native.model.layers:
        vars(layer.self_attn).pop("sliding_window", None)
    model = megacompile.stream(copy.deepcopy(native), device="cpu")
    ours, theirs = (verdicts._loss_and_gradients(each, verdicts.padded_batch()) for each in (model, native))
    assert verdicts._difference(native, verdicts.padded_batch(), ours, theirs) == ("exact", "")
    model.megacompile.close()


def test_a_family_that_keeps_attention_s_results_alone_is_exact(keeping_type: str, judged: Callable[..., Verdict]) -> None:
    """Layers of it that have no attention keep nothing then."""
    verdict = judged(keeping_type, saved_layers=1 << 10, residuals="attention")
    assert verdict.outcome == "exact", verdict.reason


def test_a_family_compiled_in_bf16_is_as_exact_as_native_bf16(compiled_type: str) -> None:
    """On the GPU where there is one (about a minute each, most of it inductor's); where it streams at all."""
    verdict = judge_compiled(compiled_type, "cuda" if torch.cuda.is_available() else "cpu")
    assert stated_outcome(compiled_type) != "exact" or verdict.outcome == "exact", verdict.reason


def test_a_family_that_streams_is_planned_by_the_rates_of_a_gpu(planned_type: str) -> None:
    """None of which is needed (10 to 90 seconds each). Its graphs are the GPU's, and all of its sizes need a time."""
    assert 0 < predicted_step(planned_type, "h200") < 1


def test_no_family_is_wrong_and_the_counts_are_those_of_the_table() -> None:
    rows = read_rows()
    assert rows.keys() == classes().keys(), "run docs/make_families.py"
    assert not [row.cls for row in rows.values() if row.outcome == "wrong"]
    assert all(row.reason for row in rows.values() if row.outcome in ("refused", "not built"))
    counted = page(list(rows.values())).split("\n**", 1)[1]
    assert PAGE.read_text().split("\n**", 1)[1] == counted
    assert f"{counts(list(rows.values()))} causal language models" in README.read_text()
