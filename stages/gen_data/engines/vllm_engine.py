"""vLLM in processes of its own: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stages.decoding import GenerationResult
from stages.gen_data.engines.engine import Question, Unusable
from stages.gen_data.engines.seed import outside_seed
from stages.targets import Target
from stages.vllm.engine import Vllm


class VllmEngine:
    """vLLM over the target's weights."""

    reads_messages = False

    def __init__(
        self, target: Target, batch_size: int, max_length: int, tensor_parallel_size: int = 1
    ) -> None:
        """Starts vLLM.

        Args:
            target: its layers need not be loaded.
            max_length: tokens of the longest conversation.

        Raises:
            EagleError: vLLM is not installed, or cannot run the target.
        """
        self._eos_ids = target.eos_ids
        self._max_length = max_length
        self._vllm = Vllm(
            target,
            max_length=max_length,
            max_running=batch_size,
            tensor_parallel_size=tensor_parallel_size,
        )

    def answers(self, questions: Sequence[Question]) -> Iterator[GenerationResult | Unusable]:
        names = self._vllm.submit(
            [question.prompt_ids for question in questions], [self._sampling(q) for q in questions]
        )
        asked = {name: question.id for name, question in zip(names, questions, strict=True)}
        while asked:
            for output in self._vllm.step():
                yield self._answer(asked.pop(output.request_id), output.outputs[0])

    def close(self) -> None:
        self._vllm.close()

    def _answer(self, name: str, completion: Any) -> GenerationResult | Unusable:
        token_ids = list(completion.token_ids)
        if completion.finish_reason not in ("stop", "length") or not token_ids:
            return Unusable(name, "unverified", f"vLLM ended it with {completion.finish_reason}")
        return GenerationResult(name, token_ids, "stop" if token_ids[-1] in self._eos_ids else "length")

    def _sampling(self, question: Question) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = question.params
        return SamplingParams(
            max_tokens=min(params.max_new_tokens, self._max_length - len(question.prompt_ids)),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=outside_seed(params),
            stop_token_ids=sorted(params.end_ids(self._eos_ids)),
            ignore_eos=params.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
