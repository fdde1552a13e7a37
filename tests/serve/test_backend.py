"""The commands of other engines: their own parsers take them, and what they lack is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from stages.artifacts import ArtifactWriter
from stages.errors import EagleError
from stages.heads import Eagle1Config, Eagle1Head, MedusaConfig, MedusaHead, head_files
from stages.serve.backend import Command, backend_command
from stages.serve.config import ServeConfig
from stages.targets import Target
from tests.serve import tool_templates
from tests.tiny import make_tiny_target


def command(target: Path, head: str | None, *, keys: tuple[str, ...] = (), **fields: object) -> Command:
    config = ServeConfig(target=str(target), head=head, dtype="float32", **fields)  # type: ignore[arg-type]
    return backend_command(config, keys, installed=False)


def options(made: Command) -> dict[str, str]:
    """By name, "" for those without a value."""
    words = list(made.arguments)
    pairs = zip(words, [*words[1:], ""], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_flags_become_vllms_options(tiny_folder: Path, head_folder: str) -> None:
    made = command(
        tiny_folder,
        head_folder,
        keys=("sk-secret",),
        backend="vllm",
        host="0.0.0.0",
        port=8123,
        served_model_name="mine",
        max_batch=4,
        max_queue=9,
        max_model_len=256,
        cors_origin=("https://a.example",),
        prefix_reuse=False,
        shutdown_timeout=45,
        tree="chain:depth=5",
        backend_args="--tensor-parallel-size 2",
    )
    assert made.arguments[:3] == ("vllm", "serve", str(tiny_folder))
    found = options(made)
    assert json.loads(found.pop("--speculative-config")) == {
        "method": "eagle3",
        "model": head_folder,
        "num_speculative_tokens": 5,
    }
    assert found == {
        "--host": "0.0.0.0",
        "--port": "8123",
        "--served-model-name": "mine",
        "--dtype": "float32",
        "--max-num-seqs": "4",
        "--max-model-len": "256",
        "--max-num-queued-reqs": "9",
        "--shutdown-timeout": "45",
        "--allowed-origins": '["https://a.example"]',
        "--no-enable-prefix-caching": "",
        "--tensor-parallel-size": "2",
    }
    assert made.environment["VLLM_API_KEY"] == "sk-secret"
    shown = made.shown()
    assert "sk-secret" not in shown
    assert shown.startswith('VLLM_NO_USAGE_STATS=1 VLLM_API_KEY="$EAGLE_API_KEY" vllm serve ')
    assert tuple(shlex.split(shown)[2:]) == made.arguments


def test_flags_become_sglangs_options(tiny_folder: Path, head_folder: str) -> None:
    made = command(
        tiny_folder,
        head_folder,
        keys=("sk-secret",),
        backend="sglang",
        max_batch=4,
        max_queue=9,
        max_model_len=256,
        device="cuda",
        tree="dynamic:depth=4,width=3,nodes=10",
    )
    assert made.arguments[1:5] == ("-m", "sglang.launch_server", "--model-path", str(tiny_folder))
    found = options(made)
    del found["--model-path"]
    assert found == {
        "--host": "127.0.0.1",
        "--port": "8000",
        "--served-model-name": str(tiny_folder),
        "--dtype": "float32",
        "--max-running-requests": "4",
        "--context-length": "256",
        "--max-queued-requests": "9",
        "--device": "cuda",
        "--enable-metrics": "",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": head_folder,
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "3",
        "--speculative-num-draft-tokens": "11",
        "--api-key": "sk-secret",
    }
    assert "sk-secret" not in made.shown()


def test_the_default_tree_stands_for_a_chain_and_none_for_no_head(
    tiny_folder: Path, head_folder: str
) -> None:
    vllm = options(command(tiny_folder, head_folder, backend="vllm"))
    assert json.loads(vllm["--speculative-config"])["num_speculative_tokens"] == 3
    sglang = options(command(tiny_folder, head_folder, backend="sglang"))
    assert (sglang["--speculative-num-steps"], sglang["--speculative-num-draft-tokens"]) == ("3", "4")
    for head, tree in ((head_folder, "none"), (None, "cost")):
        plain = command(tiny_folder, head, backend="vllm", tree=tree)
        assert "--speculative-config" not in plain.arguments


def test_a_free_port_is_found_where_none_is_named(tiny_folder: Path) -> None:
    assert int(options(command(tiny_folder, None, backend="vllm", port=0))["--port"]) > 0


def test_calls_of_tools_are_parsed_where_the_template_writes_them(tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "target", chat_template=tool_templates.TAGGED)
    vllm = options(command(tmp_path / "target", None, backend="vllm"))
    assert vllm["--tool-call-parser"] == "hermes"
    assert "--enable-auto-tool-choice" in vllm
    assert options(command(tmp_path / "target", None, backend="sglang"))["--tool-call-parser"] == "qwen25"
    template = tmp_path / "other.jinja"
    template.write_text(tool_templates.BARE)
    vllm = options(command(tmp_path / "target", None, backend="vllm", chat_template=str(template)))
    assert (vllm["--tool-call-parser"], vllm["--chat-template"]) == ("llama3_json", str(template))


def test_heads_of_other_kinds_go_to_vllm_by_their_methods(
    target: Target, tiny_folder: Path, tmp_path: Path
) -> None:
    heads = {
        "eagle": Eagle1Head(Eagle1Config.from_target(target.config, 64)),
        "medusa": MedusaHead(MedusaConfig.from_target(target.config, 64)),
    }
    for method, head in heads.items():
        folder = str(tmp_path / method)
        with ArtifactWriter.open(folder, "head", {}, target=target.fingerprint) as writer:
            for name, data in head_files(head).items():
                writer.add_file(name, data)
            writer.finish({})
        made = command(tiny_folder, folder, backend="vllm", tree="chain:depth=6")
        speculation = json.loads(options(made)["--speculative-config"])
        assert speculation["method"] == method
        assert speculation["num_speculative_tokens"] == (3 if method == "medusa" else 6)
        with pytest.raises(EagleError, match="SGLang would not draft with this head as it is"):
            command(tiny_folder, folder, backend="sglang")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rate_limit": 5}, "--rate-limit is no option of vLLM"),
        ({"log_format": "json"}, "--log-format is no option of vLLM"),
        ({"device": "cpu"}, "--device is no option of vLLM"),
        ({"backend": "sglang", "cors_origin": ("*",)}, "--cors-origin is no option of SGLang"),
        ({"backend": "sglang", "shutdown_timeout": 9}, "--shutdown-timeout is no option of SGLang"),
        ({"tree": "best:nodes=4"}, "--tree best:.* is not to be had there; vLLM drafts chains"),
        ({"backend_args": "--x 'y"}, "is no list of words"),
        ({"chat_template": "memory://t.jinja"}, "memory://t.jinja"),
        ({"keys": ("a", "b")}, "takes one API key, not 2"),
    ],
)
def test_what_the_other_engine_lacks_is_refused_in_one_line(
    tiny_folder: Path, head_folder: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(EagleError, match=message) as caught:
        command(tiny_folder, head_folder, **{"backend": "vllm", **fields})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_head_of_another_target_is_refused(head_folder: str, tmp_path: Path) -> None:
    make_tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(EagleError, match="differs in weights"):
        command(tmp_path / "other", head_folder, backend="vllm")


def test_flags_of_another_backend_need_one() -> None:
    for fields in ({"print_command": True}, {"backend_args": "--x"}):
        with pytest.raises(ValidationError, match="goes with --backend"):
            ServeConfig(target="t", **fields)  # type: ignore[arg-type]


def test_the_command_line_prints_the_command_and_refuses_an_engine_that_is_not_here(
    tiny_folder: Path, head_folder: str, tmp_path: Path
) -> None:
    # A module of the engine's name stands in for one that is installed: it shows what it is started with.
    fake = tmp_path / "sglang"
    fake.mkdir()
    (fake / "__init__.py").touch()
    (fake / "launch_server.py").write_text("import os, sys; print(os.getpid(), *sys.argv[1:])")
    flags = ["--target", str(tiny_folder), "--head", head_folder, "--dtype", "float32", "--backend", "sglang"]
    eagle = [sys.executable, "-m", "eagle_cli", "serve", *flags]
    printed = subprocess.run([*eagle, "--print-command"], capture_output=True, text=True, check=True).stdout
    expected = command(tiny_folder, head_folder, backend="sglang").shown()
    assert printed == expected + "\n"
    assert (
        "not installed here: pip install sglang"
        in subprocess.run(eagle, capture_output=True, text=True).stderr
    )
    process = subprocess.Popen(
        eagle, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=with_path(tmp_path)
    )
    _, log = process.communicate(timeout=120)
    pid, *arguments = log.splitlines()[-1].split()
    assert int(pid) == process.pid, "the same process, so that signals reach the engine"
    assert arguments == shlex.split(expected)[3:]


def with_path(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])}
