"""Heads in the layouts of other projects become ours: the same weights, the same drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stages.artifacts import ArtifactWriter, open_artifact
from stages.convert import stage
from stages.convert.config import ConvertConfig
from stages.convert.vocabulary import draft_ids
from stages.errors import EagleError
from stages.heads import (
    DraftHead,
    Eagle1Config,
    Eagle1Head,
    Eagle3Config,
    Eagle3Head,
    MedusaConfig,
    MedusaHead,
    head_files,
    head_of,
    init_from_target,
    load_head,
)
from stages.progress import Reporter
from stages.targets import Target, load_target
from tests.convert.foreign import (
    saved,
    write_eagle1_head,
    write_eagle_head,
    write_medusa_heads,
    write_sglang_head,
    write_speculators_head,
)
from tests.tiny import make_tiny_target
from tests.train.chains import Rows

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("target"), vocab=300, hidden=32))


@pytest.fixture(scope="module")
def target(path: str) -> Target:
    return load_target(path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle3Head:
    """Random, with heads wider than the model divided by them, and RoPE of its own."""
    config = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"head_dim": 16, "intermediate_size": 48, "rope_theta": 50000.0, "torch_dtype": "float32"}
    )
    return random_head(config, target)


def random_head(config: Any, target: Target) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = head_of(config)
        made.set_vocabulary(torch.randperm(300)[: config.draft_vocab_size].sort().values)
        for parameter in made.parameters():
            parameter.data.normal_(std=0.3)
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    if not isinstance(made, MedusaHead) or made.config.shared_output:
        init_from_target(made, weights, init="random")
    return made.eval().requires_grad_(False)


def convert(source: Path, output: Path, target: str | None, report: Reporter = QUIET, **settings: Any) -> Any:
    fields = {"source": str(source), "output": str(output), "target": target, "device": "cpu"}
    return stage.run(ConvertConfig(**(fields | settings)), report)


def refusal(source: Path, output: Path, target: str | None, **settings: Any) -> str:
    with pytest.raises(EagleError) as error:
        convert(source, output, target, **settings)
    assert "\n" not in str(error.value)
    assert not output.exists()
    return str(error.value)


def load(output: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_head(open_artifact(str(output), "head"), dtype=dtype, device="cpu")


def drafted(head: DraftHead) -> Tensor:
    """The logits of a head behind some states and tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        states = torch.randn(5, 96 if head.config.state == "aux" else 32)
        tokens = torch.randint(0, 300, (5,))
    if isinstance(head, MedusaHead):
        return head.logits(head(states))
    rows, logits = Rows(head), []
    for rows.position, (token, state) in enumerate(zip(tokens, states, strict=True)):
        hidden = head(token, head.fuse(state), torch.tensor(rows.position), rows.attend)
        logits.append(head.logits(hidden))
    rows.position += 1
    hidden = head(tokens[0], head.feedback(hidden), torch.tensor(rows.position), rows.attend)
    return torch.stack([*logits, head.logits(hidden)])


def assert_same(converted: DraftHead, head: DraftHead) -> None:
    assert converted.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name
    assert torch.equal(drafted(converted), drafted(head))


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def with_ids(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`d2t` holds target ids instead of offsets."""
    return tensors | {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


def by_frequency(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The draft vocabulary in another order than the target's."""
    order = torch.randperm(40)
    ids = (tensors["d2t"] + torch.arange(40))[order]
    return tensors | {"d2t": ids - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order]}


def with_copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(40, 32)}


Writer = Callable[[Path, Eagle3Head], Path]
LAYOUTS: dict[str, Writer] = {
    "EAGLE, pickled": write_eagle_head,
    "SpecForge": lambda folder, head: write_eagle_head(
        folder, head, pickled=False, architectures=["LlamaForCausalLMEagle3"]
    ),
    "names with a prefix": lambda folder, head: write_eagle_head(folder, head, change=prefixed),
    "ids for offsets": lambda folder, head: write_eagle_head(folder, head, change=with_ids),
    "vocabulary in another order": lambda folder, head: write_eagle_head(folder, head, change=by_frequency),
    "layers as SGLang counts them": lambda folder, head: write_eagle_head(
        folder, head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    ),
    "speculators": lambda folder, head: write_speculators_head(folder, head, None),
    "speculators, default layers": lambda folder, head: write_speculators_head(
        folder, head, None, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
    ),
    "speculators, copies of the target": lambda folder, head: write_speculators_head(
        folder, head, None, change=with_copies
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_has_the_same_weights_and_drafts_after_conversion(
    layout: str, target: Target, path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    source = LAYOUTS[layout](tmp_path / "theirs", head)
    convert(source, tmp_path / "ours", path)
    artifact = open_artifact(str(tmp_path / "ours"), "head")
    artifact.require_target(target.fingerprint)
    converted = load(tmp_path / "ours")
    assert converted.config == head.config
    assert_same(converted, head)


def test_a_speculators_head_names_its_target(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    source = write_speculators_head(tmp_path / "theirs", head, verifier=path)
    convert(source, tmp_path / "ours", None)
    assert_same(load(tmp_path / "ours"), head)
    nameless = write_speculators_head(tmp_path / "nameless", head, verifier=None)
    assert "give --target" in refusal(nameless, tmp_path / "x", None)


def test_a_head_trained_anew_is_not_taken_for_the_one_that_is_there(
    path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    convert(write_eagle_head(tmp_path / "theirs", head), tmp_path / "ours", path)
    again = convert(tmp_path / "theirs", tmp_path / "ours", path)
    assert "already complete" in again.summary()
    anew = write_eagle_head(
        tmp_path / "anew", head, change=lambda tensors: tensors | {"norm.weight": torch.ones(32)}
    )
    with pytest.raises(EagleError, match="made with other settings"):
        convert(anew, tmp_path / "ours", path)


def test_weights_in_several_files_are_one_head(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    source = write_eagle_head(tmp_path / "theirs", head, pickled=False)
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    parts = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(parts.values()):
        mine = {name: tensors[name] for name in tensors if parts[name] == part}
        safetensors.torch.save_file(mine, source / part)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    convert(source, tmp_path / "ours", path)
    assert_same(load(tmp_path / "ours"), head)


def test_the_whole_vocabulary_needs_no_map(target: Target, path: str, tmp_path: Path) -> None:
    config = Eagle3Config.from_target(target.config, 300).model_copy(update={"torch_dtype": "float32"})
    whole = random_head(config, target)
    source = write_eagle_head(
        tmp_path / "theirs",
        whole,
        change=lambda tensors: {name: each for name, each in tensors.items() if name not in ("d2t", "t2d")},
    )
    convert(source, tmp_path / "ours", path)
    assert_same(load(tmp_path / "ours"), whole)


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]},  # vLLM's field counts inputs of layers
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},  # SGLang's their outputs
    ],
)
def test_other_feature_layers_go_along(
    config: dict[str, Any], path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    convert(write_eagle_head(tmp_path / "theirs", head, **config), tmp_path / "ours", path)
    assert load(tmp_path / "ours").config.feature_layers == (1, 3, 6)


def test_a_head_in_half_precision_stays_in_it_unless_told(
    path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    def half(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.half() if each.is_floating_point() else each for name, each in tensors.items()}

    source = write_eagle_head(tmp_path / "theirs", head, change=half)
    for name, dtype, stored in (("as-is", "auto", torch.float16), ("wide", "float32", torch.float32)):
        convert(source, tmp_path / name, path, dtype=dtype)
        tensors = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert {each.dtype for each in tensors.values() if each.is_floating_point()} == {stored}
        assert torch.equal(tensors["fc.weight"].float(), head.fc.weight.half().float())


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


def adding(**more: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name.replace("__", "."): tensor for name, tensor in more.items()}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            without("midlayer.hidden_norm.weight", "norm.weight"),
            "missing midlayer.hidden_norm.weight; missing norm",
        ),
        (without("lm_head.weight"), "missing lm_head.weight"),
        (without("fc.weight"), "no fc.weight"),
        (without("d2t"), "has no d2t"),
        (adding(fc__bias=torch.zeros(32)), "unknown fc.bias"),
        (adding(layers__1__mlp__up_proj__weight=torch.zeros(1)), "unknown layers.1.mlp.up_proj.weight"),
        (
            adding(layers__0__hidden_norm__weight=torch.zeros(32)),
            "two tensors for midlayer.hidden_norm.weight",
        ),
        (adding(norm__weight=torch.zeros(31)), r"norm.weight has shape (31,), not (32,)"),
        (adding(lm_head__weight=torch.full((40, 32), float("nan"))), "lm_head.weight holds NaN"),
        (
            adding(d2t=torch.zeros(40, dtype=torch.int64)),
            "fits neither as offsets nor as ids the t2d beside it",
        ),
        (adding(t2d=torch.ones(200, dtype=torch.bool)), "t2d has shape (200,)"),
        (adding(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(8)), "are not the RoPE frequencies"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    complaint: str,
    path: str,
    head: Eagle3Head,
    tmp_path: Path,
) -> None:
    source = write_eagle_head(tmp_path / "theirs", head, change=change)
    assert complaint in refusal(source, tmp_path / "ours", path)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"fc_norm": True}, "missing fc_norm.0.weight"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"num_hidden_layers": 2}, "missing layers.1."),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE of type dynamic"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "takes features at layers [1, 2, 8]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["chunked_attention"], "sliding_window": 64}, "layer_types chunked_attention"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "takes features at layers [1, 2]"),
        ({"vocab_size": 301}, "has vocab_size 301, and --target"),
        ({"hidden_size": 64}, "has target_hidden_size 64, and --target"),
        ({"draft_vocab_size": 41}, "lm_head.weight has shape (40, 32), not (41, 32)"),
        ({"model_type": "mamba"}, "model_type mamba"),
        ({"hidden_size": None}, "cannot be read"),
    ],
)
def test_heads_that_compute_something_else_are_refused_by_name(
    config: dict[str, Any], complaint: str, path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    source = write_eagle_head(tmp_path / "theirs", head, **config)
    assert complaint in refusal(source, tmp_path / "ours", path)


SWITCHED = {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("changes", "write"),
    [
        ({"norm_before_residual": True, "norm_before_fc": True}, write_speculators_head),
        (SWITCHED, write_speculators_head),
        (SWITCHED, write_sglang_head),
        ({"sliding_window": 3}, write_eagle_head),
    ],
)
def test_variants_of_eagle3_go_along(
    changes: dict[str, Any], write: Callable[..., Path], target: Target, path: str, tmp_path: Path
) -> None:
    config = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"torch_dtype": "float32"} | changes
    )
    made = random_head(config, target)
    switches = {
        name: value for name, value in changes.items() if name.startswith("norm") or name == "fc_norm"
    }
    if write is write_speculators_head:
        source = write(tmp_path / "theirs", made, path, **switches)
        raw = json.loads((source / "config.json").read_text())
        raw["transformer_layer_config"]["num_hidden_layers"] = config.num_hidden_layers
        (source / "config.json").write_text(json.dumps(raw))
    elif write is write_eagle_head:
        source = write(tmp_path / "theirs", made, layer_types=["sliding_attention"], sliding_window=3)
    else:
        source = write(tmp_path / "theirs", made)
    convert(source, tmp_path / "ours", path)
    converted = load(tmp_path / "ours")
    assert converted.config == config
    assert_same(converted, made)


@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"num_hidden_layers": 2}])
def test_eagle1_heads_go_through_the_targets_own_output(
    changes: dict[str, Any], target: Target, path: str, tmp_path: Path
) -> None:
    config = Eagle1Config.from_target(target.config, 300).model_copy(
        update={"torch_dtype": "float32"} | changes
    )
    made = random_head(config, target)
    convert(write_eagle1_head(tmp_path / "theirs", made), tmp_path / "ours", path)
    converted = load(tmp_path / "ours")
    assert isinstance(converted, Eagle1Head)
    assert converted.config == config
    assert_same(converted, made)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (adding(norm2__weight=torch.ones(32)), "is no EAGLE-1 head that this version runs: unknown norm2"),
        (
            adding(layers__0__input_layernorm__weight=torch.ones(32)),
            "unknown layers.0.input_layernorm.weight",
        ),
        (without("layers.0.mlp.up_proj.weight"), "missing layers.0.mlp.up_proj.weight"),
        (adding(lm_head__weight=torch.ones(300, 32)), "lm_head.weight is not the lm_head of"),
    ],
)
def test_tensors_that_do_not_fit_an_eagle1_head_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    complaint: str,
    target: Target,
    path: str,
    tmp_path: Path,
) -> None:
    made = random_head(Eagle1Config.from_target(target.config, 300), target)
    assert complaint in refusal(
        write_eagle1_head(tmp_path / "theirs", made, change=change), tmp_path / "x", path
    )


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_heads_are_read_by_number(shared: bool, target: Target, path: str, tmp_path: Path) -> None:
    config = MedusaConfig.from_target(target.config, 300).model_copy(
        update={"heads": 4, "layers": 2, "torch_dtype": "float32", "shared_output": shared}
    )
    made = random_head(config, target)
    result = convert(write_medusa_heads(tmp_path / "theirs", made, path), tmp_path / "ours", None)
    assert "Medusa head of" in result.summary()
    converted = load(tmp_path / "ours")
    assert converted.config == config
    assert_same(converted, made)


def test_medusa_heads_of_a_reduced_vocabulary_are_put_in_order(
    target: Target, path: str, tmp_path: Path
) -> None:
    """As vLLM's converted heads have it: its names, and a map of tokens in an order of their own."""
    made = random_head(
        MedusaConfig.from_target(target.config, 40).model_copy(update={"torch_dtype": "float32"}), target
    )
    order = torch.randperm(40)

    def as_vllm(_: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = {name: tensor for name, tensor in made.state_dict().items() if name.startswith("blocks.")}
        return blocks | {"token_map": made.draft_ids[order], "lm_head.weight": made.lm_head.weight[order]}

    convert(write_medusa_heads(tmp_path / "theirs", made, path, change=as_vllm), tmp_path / "ours", path)
    assert_same(load(tmp_path / "ours"), made)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (adding(extra=torch.ones(1)), "is no Medusa head that this version runs: unknown extra"),
        (without("1.0.linear.weight"), "missing blocks.1.layers.0.weight"),
        (without("0.0.linear.weight"), "it has no blocks.0.layers.0.weight"),
        (adding(token_map=torch.tensor([3, 3])), "token_map is not one of distinct tokens"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    complaint: str,
    target: Target,
    path: str,
    tmp_path: Path,
) -> None:
    made = random_head(MedusaConfig.from_target(target.config, 300), target)
    source = write_medusa_heads(tmp_path / "theirs", made, path, change=change)
    assert complaint in refusal(source, tmp_path / "x", None)


@pytest.mark.parametrize("changes", [{}, SWITCHED, {"sliding_window": 3}, {"feature_layers": (1, 3, 6)}])
def test_speculators_format_holds_the_same_head(
    changes: dict[str, Any], target: Target, path: str, tmp_path: Path
) -> None:
    """Written from a head of ours, it names its target, loads here, and converts back."""
    linear = {"rope_type": "linear", "factor": 2.0}
    config = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"torch_dtype": "float32", "rope_theta": 5e4, "rope_scaling": linear} | changes
    )
    made = random_head(config, target)
    with ArtifactWriter.open(str(tmp_path / "head"), "head", {}, target=target.fingerprint) as writer:
        for name, data in head_files(made).items():
            writer.add_file(name, data)
        writer.finish({})
    convert(tmp_path / "head", tmp_path / "theirs-now", None, to="speculators")
    assert_same(load(tmp_path / "theirs-now"), made)
    assert load(tmp_path / "theirs-now").config == config
    raw = json.loads((tmp_path / "theirs-now" / "config.json").read_text())
    assert raw["architectures"] == ["Eagle3Speculator"]
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": path,
        "architectures": ["LlamaForCausalLM"],
    }
    tensors = safetensors.torch.load_file(tmp_path / "theirs-now" / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in tensors
    assert not any(name.startswith("midlayer") for name in tensors)
    (tmp_path / "theirs-now" / "manifest.json").unlink()
    convert(tmp_path / "theirs-now", tmp_path / "again", None)
    assert_same(load(tmp_path / "again"), made)
    assert load(tmp_path / "again").config == config


def test_what_speculators_format_cannot_hold_is_refused(target: Target, path: str, tmp_path: Path) -> None:
    medusa = random_head(MedusaConfig.from_target(target.config, 300), target)
    source = write_medusa_heads(tmp_path / "theirs", medusa, path)
    assert "no format for heads of kind medusa" in refusal(source, tmp_path / "x", path, to="speculators")
    eagle3 = random_head(Eagle3Config.from_target(target.config, 40), target)
    with ArtifactWriter.open(str(tmp_path / "head"), "head", {}, target=target.fingerprint) as writer:
        for name, data in head_files(eagle3).items():
            writer.add_file(name, data)
        writer.finish({})
    complaint = refusal(tmp_path / "head", tmp_path / "x", "builtin:smollm2", to="speculators")
    assert "builtin:smollm2 means nothing to other tools" in complaint
    assert "use it as it is, or say --to speculators" in refusal(tmp_path / "head", tmp_path / "x", path)


def test_drafters_of_other_kinds_are_refused(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    convert(write_eagle_head(tmp_path / "theirs", head), tmp_path / "ours", path)
    assert "is an eagle artifact already" in refusal(tmp_path / "ours", tmp_path / "x", path)
    other = write_speculators_head(tmp_path / "dflash", head, path, speculators_model_type="dflash")
    assert "a drafter of type dflash" in refusal(other, tmp_path / "x", None)
    source = write_eagle_head(tmp_path / "bare", head)
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert "has no hidden_size, intermediate_size" in refusal(source, tmp_path / "x", path)
    (source / "config.json").write_text("[]")
    assert "is not a JSON object" in refusal(source, tmp_path / "x", path)


def test_damaged_and_unsafe_files_are_refused(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    source = write_eagle_head(tmp_path / "theirs", head)
    whole = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(whole[:-50])
    assert "cannot be read" in refusal(source, tmp_path / "x", path)
    (source / "pytorch_model.bin").write_bytes(saved(head))
    assert "holds more than tensors (stages.heads.eagle3.Eagle3Head)" in refusal(source, tmp_path / "x", path)
    (source / "pytorch_model.bin").write_bytes(saved({"state": {"fc.weight": torch.zeros(1)}}))
    assert "something else than tensors by name" in refusal(source, tmp_path / "x", path)


def test_the_rope_of_a_head_is_the_one_its_config_says(target: Target, path: str, tmp_path: Path) -> None:
    scaled = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "torch_dtype": "float32"}
    )
    made = Eagle3Head(scaled)
    inverse = {"midlayer.self_attn.rotary_emb.inv_freq": made.rotary.frequencies}
    source = write_eagle_head(
        tmp_path / "theirs",
        made,
        change=lambda tensors: tensors | inverse,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    convert(source, tmp_path / "ours", path)
    converted = load(tmp_path / "ours")
    assert converted.config == scaled
    assert torch.equal(converted.rotary.frequencies, made.rotary.frequencies)
    plain = write_eagle_head(tmp_path / "plain", made)
    config = json.loads((plain / "config.json").read_text())
    del config["rope_theta"]
    (plain / "config.json").write_text(json.dumps(config))
    convert(plain, tmp_path / "default", path)
    assert load(tmp_path / "default").config.rope_theta == 10000.0


def test_embeddings_of_another_target_are_noticed(
    path: str, head: Eagle3Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_speculators_head(tmp_path / "theirs", head, path)
    convert(source, tmp_path / "right", path, Reporter())
    assert "warning" not in capsys.readouterr().err
    other = make_tiny_target(tmp_path / "other", vocab=300, hidden=32, seed=1)
    convert(source, tmp_path / "wrong", str(other), Reporter())
    assert "token embeddings differ from those of" in capsys.readouterr().err


@given(st.sets(st.integers(0, 60), min_size=1, max_size=40), st.booleans())
def test_both_ways_to_store_a_vocabulary_give_the_same_ids(chosen: set[int], as_ids: bool) -> None:
    ids = torch.tensor(sorted(chosen))
    covered = torch.zeros(61, dtype=torch.bool)
    covered[ids] = True
    stored = ids if as_ids else ids - torch.arange(len(ids))
    assert torch.equal(draft_ids(stored, covered, 61, "here"), ids)


def test_a_vocabulary_that_can_be_read_in_two_ways_is_refused() -> None:
    ids = torch.tensor([0, 2, 5])
    with pytest.raises(EagleError, match="no t2d to tell"):
        draft_ids(ids, None, 61, "here")
    assert torch.equal(draft_ids(torch.tensor([3, 3, 4]), None, 61, "here"), torch.tensor([3, 4, 6]))
    assert torch.equal(draft_ids(torch.tensor([10, 40, 60]), None, 61, "here"), torch.tensor([10, 40, 60]))
