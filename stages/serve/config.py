"""What `eagle serve` can be told. One field is one flag; the description is its help text."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

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
            "log_format",
        ),
        "Access": ("api_key", "max_body", "cors_origin"),
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
    max_batch: int = Field(
        default=8, ge=1, le=256, description="Requests that are answered together; others wait."
    )
    max_queue: int = Field(
        default=64, ge=1, description="Requests that may wait for their turn; more are answered 429."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Tokens of a prompt and its answer together; the target's whole context by default.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="How the line of each request is written; it never holds user text."
    )
    api_key: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="Key that clients must send as a bearer token. Better set EAGLE_API_KEY: a command line "
        "can be read by others on the machine.",
    )
    max_body: Bytes = Field(
        default=4 * 2**20, ge=1024, description="Size of a request's body; larger ones are answered 413."
    )
    cors_origin: tuple[str, ...] = Field(
        default=(),
        description="Origin of web pages that may read the answers, such as https://example.com; may be "
        "given several times, * is any.",
    )
    tree: str = Field(
        default="cost",
        description="Draft tree: cost (what pays on this machine), none, chain:depth=3, "
        "dynamic:depth=6,width=4,nodes=12, best:nodes=12 or static:0,1,0.0.",
    )
