"""What holds for heads of every kind: saving, loading, what they keep of the target, how large they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import CohereConfig, LlamaConfig

from stages.artifacts import open_artifact
from stages.errors import EagleError
from stages.heads import (
    DraftHead,
    Eagle1Config,
    Eagle1Head,
    HeadKind,
    HeadOptions,
    HeadSize,
    MedusaConfig,
    MedusaHead,
    head_files,
    head_of,
    init_from_target,
    last_layer,
    load_head,
    make_head,
    read_config,
)
from tests.heads.folders import write_head
from tests.tiny import make_tiny_target

VOCAB, HIDDEN = 300, 64
TARGET = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
WEIGHTS = {
    "embed_tokens.weight": torch.randn(VOCAB, HIDDEN),
    "norm.weight": torch.randn(HIDDEN),
    "lm_head.weight": torch.randn(VOCAB, HIDDEN),
}
IDS = torch.arange(0, VOCAB, 7)[:40]
KINDS: tuple[tuple[HeadKind, HeadOptions], ...] = (
    ("eagle3", HeadOptions()),
    (
        "eagle3",
        HeadOptions(
            layers=3, head_dim=24, sliding_window=9, norm_before_fc=True, fc_norm=True, norm_output=True
        ),
    ),
    ("eagle1", HeadOptions()),
    ("eagle1", HeadOptions(layers=2, head_dim=24)),
    ("medusa", HeadOptions(heads=4, layers=2)),
)
any_kind = pytest.mark.parametrize(("kind", "options"), KINDS)


def made(kind: HeadKind, options: HeadOptions | None = None) -> DraftHead:
    head = make_head(kind, TARGET, len(IDS), options=options)
    head.set_vocabulary(IDS)
    init_from_target(head, WEIGHTS)
    for parameter in head.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return head


def load(uri: str, dtype: torch.dtype = torch.bfloat16) -> DraftHead:
    return load_head(open_artifact(uri, "head"), dtype=dtype, device="cpu")


@any_kind
def test_a_head_survives_saving_and_loading(kind: HeadKind, options: HeadOptions, tmp_path: Path) -> None:
    head = made(kind, options)
    loaded = load(write_head(str(tmp_path / "head"), head_files(head)))
    assert loaded.config == head.config
    assert loaded.kind == kind
    assert torch.equal(loaded.draft_ids, IDS)
    assert loaded.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], expected), name


@any_kind
def test_the_stated_size_is_that_of_the_trained_parameters(kind: HeadKind, options: HeadOptions) -> None:
    head = made(kind, options)
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    assert head.config.num_parameters == trained
    size = HeadSize.of(head.config, 20 * trained)
    assert str(size) == f"{trained / 1e6:.1f} M parameters, 5.0% of the target's"


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(sorted(t)[-1]), "missing "),
        (lambda t: t.update({"midlayer.extra": torch.zeros(1)}), "unknown midlayer.extra"),
        (lambda t: t.update({sorted(t)[0]: torch.zeros(3)}), r"has shape \(3,\), not \("),
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "draft/vocabulary.safetensors"])
def test_tensors_that_do_not_fit_are_refused_by_name(
    kind: HeadKind, change, complaint: str, file: str, tmp_path: Path
) -> None:
    files = head_files(made(kind))
    if file not in files:
        assert kind == "eagle3"
        return
    tensors = safetensors.torch.load(files[file])
    change(tensors)
    files[file] = safetensors.torch.save(tensors)
    with pytest.raises(EagleError, match=f"{file} does not fit its config.json.*{complaint}"):
        load(write_head(str(tmp_path), files))


def test_heads_of_another_kind_are_refused() -> None:
    with pytest.raises(EagleError, match=r"architecture \['LlamaForCausalLM'\] is not supported"):
        read_config(made("eagle3").config.to_hf() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(EagleError, match="lacks or has unreadable fields: heads"):
        read_config(made("medusa").config.to_hf() | {"num_heads": None})


def test_an_eagle1_folder_is_what_vllm_loads_and_our_vocabulary_beside_it() -> None:
    files = head_files(made("eagle1", HeadOptions(layers=2)))
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert config["model_type"] == "llama"
    layer = {
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
        "post_attention_layernorm.weight": (64,),
    }
    assert shapes(files["model.safetensors"]) == {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (64, 128),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
        **{f"layers.1.{name}": shape for name, shape in layer.items()},
        "layers.1.input_layernorm.weight": (64,),
    }
    vocabulary = safetensors.torch.load(files["draft/vocabulary.safetensors"])
    assert torch.equal(vocabulary["vocabulary"], IDS)
    assert torch.equal(vocabulary["lm_head.weight"], WEIGHTS["lm_head.weight"][IDS].bfloat16())


def test_a_medusa_folder_is_what_vllm_loads_and_our_vocabulary_beside_it() -> None:
    files = head_files(made("medusa", HeadOptions(heads=2, layers=2)))
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["MedusaModel"]
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", 2, 2)
    assert config["original_lm_head"]
    assert config["vocab_size"] == config["truncated_vocab_size"] == VOCAB
    blocks = [f"blocks.{head}.layers.{layer}" for head in range(2) for layer in range(2)]
    assert shapes(files["model.safetensors"]) == {
        **{f"{block}.weight": (64, 64) for block in blocks},
        **{f"{block}.bias": (64,) for block in blocks},
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    assert shapes(files["draft/vocabulary.safetensors"]) == {"vocabulary": (40,)}
    rows = safetensors.torch.load(files["model.safetensors"])["lm_head.weight"]
    assert torch.equal(rows[IDS], WEIGHTS["lm_head.weight"][IDS].bfloat16())
    assert not rows[[i for i in range(VOCAB) if i not in IDS.tolist()]].any(), "not drafted in vLLM either"


def test_an_eagle3_head_of_the_whole_vocabulary_has_no_map(tmp_path: Path) -> None:
    """vLLM makes no room for one, and refuses tensors that it has no room for."""
    head = make_head("eagle3", TARGET, VOCAB)
    files = head_files(head)
    assert shapes(files["model.safetensors"]).keys().isdisjoint({"d2t", "t2d"})
    loaded = load(write_head(str(tmp_path / "head"), files))
    assert torch.equal(loaded.draft_ids, torch.arange(VOCAB))
    assert loaded.state_dict()["t2d"].all()


def shapes(data: bytes) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in safetensors.torch.load(data).items()}


def test_medusa_heads_start_by_repeating_what_the_target_says() -> None:
    head = make_head("medusa", TARGET, VOCAB, options=HeadOptions(heads=2))
    init_from_target(head, WEIGHTS)
    last = torch.randn(5, HIDDEN)
    assert isinstance(head, MedusaHead)
    expected = (last @ WEIGHTS["lm_head.weight"].T).expand(2, -1, -1)
    torch.testing.assert_close(head.logits(head(last)), expected)


def test_heads_that_share_the_targets_output_scale_it_as_the_target_does() -> None:
    target = CohereConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.25,
    )
    for kind in ("eagle1", "medusa"):
        head = make_head(kind, target, 40)  # type: ignore[arg-type]
        init_from_target(head, WEIGHTS)
        hidden = torch.randn(3, HIDDEN)
        rows = WEIGHTS["lm_head.weight"][:40]
        torch.testing.assert_close(head.logits(hidden), 0.25 * hidden @ rows.T)
        assert head.config.to_hf()["logit_scale"] == 0.25


def test_a_target_whose_lm_head_has_a_bias_is_refused_where_heads_go_through_it() -> None:
    biased = WEIGHTS | {"lm_head.bias": torch.zeros(VOCAB)}
    init_from_target(make_head("eagle3", TARGET, 40), biased)
    for kind in ("eagle1", "medusa"):
        with pytest.raises(
            EagleError, match=f"kind {kind} goes through the target's lm_head without its bias"
        ):
            init_from_target(make_head(kind, TARGET, 40), biased)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_what_is_kept_of_the_target_is_never_trained(kind: HeadKind) -> None:
    head = make_head(kind, TARGET, 40)
    head.set_vocabulary(torch.arange(5, 45))
    tied = {name: WEIGHTS[name] for name in ("embed_tokens.weight", "norm.weight")}
    init_from_target(head, tied, init="random")
    frozen = {name: p for name, p in head.named_parameters() if not p.requires_grad}
    expected = {
        "eagle3": {"embed_tokens.weight": slice(None)},
        "eagle1": {"embed_tokens.weight": slice(None), "lm_head.weight": slice(5, 45)},
        "medusa": {"lm_head.weight": slice(5, 45)},
    }[kind]
    assert frozen.keys() == expected.keys()
    for name, rows in expected.items():
        assert torch.equal(frozen[name], WEIGHTS["embed_tokens.weight"][rows]), "tied"
    if kind == "eagle3":
        assert not torch.equal(head.lm_head.weight, WEIGHTS["embed_tokens.weight"][5:45])
        init_from_target(head, WEIGHTS, init="target")
        assert torch.equal(head.lm_head.weight, WEIGHTS["lm_head.weight"][5:45])
        assert torch.equal(head.norm.weight, WEIGHTS["norm.weight"])


@pytest.fixture(scope="module")
def stored(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[LlamaConfig, dict[str, Tensor], dict[str, Tensor]]:
    """A target's config, its two ends and its last layer, as files have them."""
    path = make_tiny_target(tmp_path_factory.mktemp("target"), vocab=300, hidden=64)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    ends = {
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "lm_head.weight": tensors["lm_head.weight"],
    }
    last = {
        f"layer.{name.removeprefix('model.layers.7.')}": tensor
        for name, tensor in tensors.items()
        if name.startswith("model.layers.7.")
    }
    found = last_layer(str(path))
    assert found.keys() == last.keys()
    assert all(torch.equal(found[name], last[name]) for name in last)
    return LlamaConfig.from_pretrained(path), ends, last


def test_a_head_can_start_as_the_targets_last_layer(stored) -> None:
    """Where the embeddings are not looked at, the head's layers compute what the target's would."""
    config, ends, last = stored
    head = make_head("eagle3", config, 300, options=HeadOptions(layers=2))
    init_from_target(head, ends | last, init="layer")
    assert not isinstance(head, MedusaHead)
    for number, layer in enumerate(head.layers_in_order):
        for name in ("self_attn.o_proj.weight", "mlp.up_proj.weight", "post_attention_layernorm.weight"):
            assert torch.equal(layer.get_parameter(name), last[f"layer.{name}"])
        queries = layer.get_parameter("self_attn.q_proj.weight")
        assert queries.shape == (64, 64 if number else 128)
        assert torch.equal(queries[:, -64:], last["layer.self_attn.q_proj.weight"])
    state = torch.randn(3, 192)
    torch.testing.assert_close(head.fuse(state), state[:, -64:])


def test_a_layer_that_does_not_fit_is_refused(stored) -> None:
    config, ends, last = stored
    wider = make_head("eagle3", config, 300, options=HeadOptions(head_dim=32))
    with pytest.raises(EagleError, match=r"self_attn.q_proj.weight is of shape \(64, 64\), not \(128, 64\)"):
        init_from_target(wider, ends | last, init="layer")
    for kind in ("eagle1", "medusa"):  # nothing of theirs is of the scale of a layer's output
        with pytest.raises(EagleError, match=f"of kind {kind} cannot start from the target's layer"):
            init_from_target(make_head(kind, config, 300), ends | last, init="layer")


def test_options_that_mean_nothing_to_a_kind_are_refused() -> None:
    for kind, options, complaint in (
        ("eagle1", HeadOptions(fc_norm=True), "fc_norm True means nothing to a head of kind eagle1"),
        ("medusa", HeadOptions(sliding_window=8), "sliding_window 8 means nothing to a head of kind medusa"),
        ("eagle1", HeadOptions(sliding_window=8), "sliding_window 8 means nothing to a head of kind eagle1"),
    ):
        with pytest.raises(EagleError, match=complaint):
            make_head(kind, TARGET, 40, options=options)  # type: ignore[arg-type]


def test_published_shapes_of_other_tools_can_be_held() -> None:
    """An ``fc`` with a bias (EAGLE's first heads), an output layer for each of Medusa's heads."""
    eagle1 = Eagle1Config.from_target(TARGET, VOCAB).model_copy(update={"bias": True})
    medusa = MedusaConfig.from_target(TARGET, VOCAB).model_copy(update={"shared_output": False})
    assert isinstance(head_of(eagle1), Eagle1Head)
    for config in (eagle1, medusa):
        head = head_of(config)
        assert config.num_parameters == sum(p.numel() for p in head.parameters() if p.requires_grad)
        assert read_config(json.loads(json.dumps(config.to_hf()))) == config
        assert head.logits(torch.randn(3, 2, HIDDEN)).shape == (3, 2, VOCAB)
