"""How the target's states leave vLLM: its own connector, made to work without a GPU as well.

vLLM imports this module by name inside its worker processes.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class HiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes the states of each finished request to a safetensors file: `hidden_states` [n, layers, h].

    vLLM's class copies them on a CUDA stream through pinned memory. Where the states are in main memory
    already there is neither, so they are gathered at once and only writing is left to the thread.
    """

    def _submit_async_write(self, pending: Any) -> None:
        if self._kv_cache is None or self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
        elif self._is_tp_rank_zero:
            self._write_from_memory(pending)

    def _write_from_memory(self, pending: Any) -> None:
        first = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (first + torch.arange(self._block_size)).flatten()
        tensors = {
            "hidden_states": extract_from_kv_cache(
                self._kv_cache, slots, len(pending.token_ids)
            ).contiguous(),
            "token_ids": pending.token_ids.clone(),
        }
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        copied, lock = _Copied(), self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, copied, pending.filename, lock)
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))


class _Copied:
    """Stands for the CUDA event of a copy that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None
