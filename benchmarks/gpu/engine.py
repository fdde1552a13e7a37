"""The engine on a target of random weights, plain and with drafts of a known acceptance."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu import DEVICE
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.size import Size

if TYPE_CHECKING:
    from stages.decoding import Engine
    from stages.targets import Target

_RIGHT = (0.6, 0.8, 0.9)
_TREE = "chain:depth=4"


def run_engine(report: Report, size: Size) -> None:
    """Plain decoding, then chains of drafts that are right with each probability; greedy.

    In float32 the tokens must be the plain ones; in half precision near-ties may fall otherwise, and only the
    speed counts.

    Raises:
        ImportError: the project's own dependencies are missing.
    """
    from stages.decoding import Engine, FixedPlanner, TreeConfig
    from stages.decoding.drafters import OracleDrafter

    target = _random_target(size)
    generator = torch.Generator().manual_seed(5)
    runs: list[Row] = []
    for batch in size.engine_batches:
        prompts = torch.randint(size.model.vocab, (batch, size.prompt), generator=generator).tolist()
        plain, reference = _measured(Engine(target, slots=batch), prompts, size.output)
        runs.append({"batch": batch, "drafter": "none"} | plain | {"speed-up": 1.0})
        for right in _RIGHT:
            oracle = OracleDrafter(right, size.model.vocab)
            for prompt, output in zip(prompts, reference, strict=True):
                oracle.know(prompt, output)
            planner = FixedPlanner(TreeConfig.parse(_TREE))
            engine = Engine(target, slots=batch, drafter=oracle, planner=planner)
            found, outputs = _measured(engine, prompts, size.output)
            speed = {"speed-up": found["tokens/s"] / plain["tokens/s"]}
            runs.append({"batch": batch, "drafter": f"oracle:{right}"} | found | speed)
            if size.dtype == torch.float32:
                same = outputs == reference
                name = f"engine: oracle:{right} at batch {batch} gives the plain tokens"
                report.check(name, same, f"{sum(map(len, outputs))} tokens")
    report.engine = {"model": asdict(size.model), "tree": _TREE, "runs": runs}


def _measured(engine: Engine, prompts: list[list[int]], output: int) -> tuple[Row, list[list[int]]]:
    """Tokens a second over all sequences, prompts not counted, and the outputs; the second of two runs."""
    from stages.decoding import GenerationRequest, SamplingParams

    params = SamplingParams(max_new_tokens=output, ignore_eos=True)
    for _ in range(2):  # the first builds what it needs
        for i, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(str(i), prompt, params))
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        stats = {}
        while engine.busy:
            for emission in engine.step():
                outputs[emission.id] += emission.tokens
                stats[emission.id] = emission.stats
    tokens, steps = sum(s.tokens for s in stats.values()), sum(s.steps for s in stats.values())
    took = max(s.decode_s for s in stats.values())
    return {"tokens/s": tokens / took, "tokens/step": tokens / steps}, list(outputs.values())


def _random_target(size: Size) -> Target:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    from stages.targets import Target
    from stages.targets.attention import SLOT_ATTENTION

    model = size.model
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with DEVICE:
        network = AutoModelForCausalLM.from_config(
            config, dtype=size.dtype, attn_implementation=SLOT_ATTENTION
        )
    network = network.eval().requires_grad_(False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")))
    return Target(name="random", model=network, tokenizer=tokenizer, device=DEVICE, dtype=size.dtype)
