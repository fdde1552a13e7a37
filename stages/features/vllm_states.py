"""The target's states taken by vLLM, for targets that need its tensor parallelism.

vLLM's method `extract_hidden_states` keeps the states of chosen layers in its cache while it reads a prompt,
and its connector writes them to a file a prompt. Its layer i is transformers' `output_hidden_states[i]`: the
residual stream entering layer i. Behind the last layer it gives the stream before the final norm, so the norm
is applied here, as is the output layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.errors import EagleError
from stages.features.states import States, TokenBatch, kept_last, most_likely_tokens, pack_states
from stages.features.storage import StorageFormat
from stages.targets import Target
from stages.targets.ends import final_norm
from stages.vllm.engine import Vllm, scratch_folder

BATCHES_AHEAD = 1
"""Batches that vLLM works on while the states of one are read."""
MAX_ROWS = 256
PROOF_ROWS = 16
"""Rows after which the states must have been shown to be the target's."""
PROOF_SHARE = 0.5


class VllmStates:
    """vLLM over the target's weights; no more than a few batches of states lie on the disk at a time.

    Which rows vLLM runs together depends on time, so in bfloat16 two runs may differ in the last bit.
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, int, int],
        storage: StorageFormat,
        *,
        every_last: bool = False,
        max_length: int,
        forward_tokens: int,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Starts vLLM.

        Args:
            target: its final norm and output layer are used; the layers need not be loaded.
            layers: the feature layers, ascending.
            storage: the format of the states.
            every_last: keep the last states of all tokens, not of the supervised ones only.
            max_length: tokens of the longest row.
            forward_tokens: tokens in one of vLLM's forward passes.

        Raises:
            EagleError: vLLM is not installed, or cannot give the states of this target.
        """
        self._target = target
        self._storage = storage
        self._every_last = every_last
        self._norm: nn.Module = final_norm(target.model)
        folder = scratch_folder()
        self._results: dict[str, Any] = {}
        self._agreed = self._compared = 0
        self._vllm = Vllm(
            target,
            max_length=max_length + 1,  # vLLM always samples a token, and wants room for it
            max_running=MAX_ROWS,
            tensor_parallel_size=tensor_parallel_size,
            options=_extraction([*layers, target.config.num_hidden_layers], folder, forward_tokens),
            folder=folder,
        )
        _to_fastest(target, self._norm)

    def states(self, batches: Iterable[TokenBatch]) -> Iterator[tuple[TokenBatch, States]]:
        """Raises EagleError: the disk for temporary files is full, vLLM stopped, or its states are not the
        target's."""
        running: deque[tuple[TokenBatch, list[str]]] = deque()
        for batch in batches:
            running.append((batch, self._submit(batch)))
            if len(running) > BATCHES_AHEAD:
                yield self._collect(*running.popleft())
        while running:
            yield self._collect(*running.popleft())

    def close(self) -> None:
        self._vllm.close()

    def _submit(self, batch: TokenBatch) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        rows = [row.tolist() for row in batch.input_ids.split(batch.row_offsets.diff().tolist())]
        return self._vllm.submit(rows, [params] * len(rows))

    @torch.inference_mode()
    def _collect(self, batch: TokenBatch, requests: list[str]) -> tuple[TokenBatch, States]:
        while not self._results.keys() >= set(requests):
            self._results.update((output.request_id, output) for output in self._vllm.step())
        results = [self._results.pop(request) for request in requests]
        rows = [self._read(result) for result in results]
        taken = torch.cat(rows)  # [T, 4, h]: low, mid, high, and the stream before the final norm
        supervised, others = kept_last(batch, self._every_last)
        last = self._finish(taken[supervised, -1])
        context = self._finish(taken[others, -1]) if self._every_last else None
        self._prove(torch.stack([row[-1, -1] for row in rows]), results)
        aux = taken[:, :-1].flatten(1).to(last.device)  # [T, 3h]
        choices = most_likely_tokens(self._target, last)
        return batch, pack_states(aux, last, choices, self._storage, context)

    def _read(self, result: Any) -> Tensor:
        """The states [n, 4, h] of a row; the file goes."""
        from safetensors import SafetensorError
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            cleanup_hidden_states,
            load_hidden_states,
        )

        path = result.kv_transfer_params["hidden_states_path"]
        try:
            states = load_hidden_states(path)["hidden_states"].clone()  # what is mapped goes with the file
        except (OSError, SafetensorError) as error:
            raise EagleError(
                f"vLLM could not leave its states in {self._vllm.folder} ({error}): make room there, or set "
                "TMPDIR to a larger disk"
            ) from error
        cleanup_hidden_states(path)
        return states

    def _finish(self, residual: Tensor) -> Tensor:
        """States [n, h] behind the final norm, of those before it."""
        return self._norm(residual.to(self._device))

    @property
    def _device(self) -> torch.device:
        return self._target.model.get_output_embeddings().weight.device

    def _prove(self, ends: Tensor, results: list[Any]) -> None:
        """Compares the token that vLLM chose behind each row with the choice of these states, `ends` [R, h].

        They differ at near ties only, unless vLLM computes this architecture otherwise than transformers.
        """
        chosen = most_likely_tokens(self._target, self._finish(ends)).tolist()
        self._agreed += sum(
            token == result.outputs[0].token_ids[0] for token, result in zip(chosen, results, strict=True)
        )
        self._compared += len(results)
        if self._compared >= PROOF_ROWS and self._agreed < PROOF_SHARE * self._compared:
            raise EagleError(
                f"vLLM's states of {self._target.name} are not those of the model: they give the token that "
                f"vLLM chooses for {self._agreed} of {self._compared} rows; use --engine transformers"
            )


def _extraction(layer_ids: list[int], folder: Path, forward_tokens: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that make it write the states at these layers to `folder`."""
    return {
        "max_num_batched_tokens": max(forward_tokens, MAX_ROWS),
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "stages.vllm.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }


def _to_fastest(target: Target, norm: nn.Module) -> None:
    """Norm and output layer go to a GPU if there is one; vLLM leaves a part of its memory free."""
    if torch.cuda.is_available():
        norm.to("cuda")
        target.model.get_output_embeddings().to("cuda")
