"""What `eagle serve` can be told. One field is one flag; the description is its help text."""

from __future__ import annotations

import ipaddress
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from stages.config import ArtifactReaderConfig, Bytes, ChatTemplateConfig, ModelConfig


class ServeConfig(ChatTemplateConfig, ArtifactReaderConfig, ModelConfig):
    """Configuration of the server: which models, where to listen, how many may wait.

    Serving writes nothing, so unlike its siblings this stage has no output and no `overwrite`.
    """

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Drafting": ("head", "tree"),
        "Server": (
            "host",
            "port",
            "served_model_name",
            "max_batch",
            "max_queue",
            "max_model_len",
            "kv_memory",
            "prefix_reuse",
            "overlap",
            "shutdown_timeout",
            "log_format",
        ),
        "Engine": ("backend", "backend_args", "print_command"),
        "Access": ("api_key", "rate_limit", "max_body", "cors_origin", "forwarded_allow_ips"),
    }

    target: str = Field(
        description="Target model: a Hugging Face id, a local folder, a .gguf file or builtin:smollm2."
    )
    head: str | None = Field(
        default=None, description="Draft head trained for this target; without one, decoding is plain."
    )
    host: str = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 accepts other machines."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    served_model_name: str | None = Field(
        default=None, description="Model name that clients use; the target's own name by default."
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Answers that are decoded together; others wait. 8 by default; another --backend has "
        "its own.",
    )
    max_queue: int | None = Field(
        default=None,
        ge=1,
        description="Answers that may wait for their turn; more are refused with 429. 64 by default; another "
        "--backend has its own.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of a prompt and its answer together; the target's whole context by default.",
    )
    kv_memory: Bytes | None = Field(
        default=None,
        ge=1,
        description="Most memory of the keys and values of all slots. Without --max-model-len it bounds the "
        "context; by default memory grows with what the requests need.",
    )
    prefix_reuse: bool = Field(
        default=True,
        description="Keep what a slot holds when its answer has ended, so that the next turn of a chat reads "
        "only what is new.",
    )
    overlap: bool = Field(
        default=True,
        description="On a GPU, launch a cycle before the tokens of the last one are read; the text is the "
        "same without. On a CPU nothing runs ahead.",
    )
    shutdown_timeout: int | None = Field(
        default=None,
        ge=0,
        description="Seconds that running answers have to finish once the server is told to stop. 10 by "
        "default; another --backend has its own.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How the line of each request is written; it never holds user text."
    )
    api_key: tuple[str, ...] = Field(
        default=(),
        repr=False,
        description="Key that clients must send as a bearer token; several tell clients apart. Better set "
        "EAGLE_API_KEY, several with commas between: a command line can be read by others on the machine.",
    )
    rate_limit: int | None = Field(
        default=None,
        ge=1,
        description="Requests that one client may send in a minute; more are answered 429. A client is who "
        "has one of several keys, else an address.",
    )
    max_body: Bytes = Field(
        default=4 * 2**20, ge=1024, description="Size of a request's body; larger ones are answered 413."
    )
    cors_origin: tuple[str, ...] = Field(
        default=(),
        description="Origin of web pages that may read the answers, such as https://example.com; may be "
        "given several times, * is any.",
    )
    forwarded_allow_ips: tuple[str, ...] = Field(
        default=(),
        description="Address or network of a proxy whose X-Forwarded-For tells who asks; may be given "
        "several times. Without one the header is not read, so that nobody passes for another.",
    )
    backend: Literal["eagle", "vllm", "sglang"] = Field(
        default="eagle",
        description="Engine that serves. vllm and sglang are started with the options that stand for these "
        "flags, and this process becomes theirs; what they lack is refused.",
    )
    backend_args: str = Field(
        default="",
        description="Further options of another backend, as one text: '--tensor-parallel-size 4'.",
    )
    print_command: bool = Field(
        default=False, description="Print the command of another backend instead of running it."
    )
    tree: str = Field(
        default="cost",
        description="Draft tree: cost (what pays on this machine), none, chain:depth=3, "
        "dynamic:depth=6,width=4,nodes=12, best:nodes=12 or static:0,1,0.0.",
    )

    @model_validator(mode="after")
    def _other_backend(self) -> Self:
        if self.backend == "eagle" and (self.backend_args or self.print_command):
            flag = "--backend-args" if self.backend_args else "--print-command"
            raise ValueError(f"{flag} goes with --backend vllm or sglang")
        return self

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _networks(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        found = []
        for each in given:
            try:
                found.append(str(ipaddress.ip_network(each.strip(), strict=False)))
            except ValueError:
                raise ValueError(
                    f"{each!r} is no address or network, such as 10.0.0.7 or 10.0.0.0/8"
                ) from None
        return tuple(found)

    @field_validator("api_key")
    @classmethod
    def _no_empty_key(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(key.strip() for key in keys):
            raise ValueError("a key is empty, so that it would keep nobody out; give one or leave it out")
        return keys
