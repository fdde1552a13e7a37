"""The engine on a target of random weights, plain and with drafts of a known acceptance, in all its loops:
the host's cycles, the device's, and the device's with the next one launched ahead."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import torch

from benchmarks.gpu import DEVICE
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.size import Size

if TYPE_CHECKING:
    from stages.decoding import Engine
    from stages.decoding.drafters import Drafter
    from stages.targets import Target

Loop = Literal["host", "device", "overlapped"]
_LOOPS: tuple[Loop, ...] = ("host", "device", "overlapped")
_RIGHT = (0.6, 0.8, 0.9)
_TREE = "chain:depth=4"


def run_engine(report: Report, size: Size) -> None:
    """Plain decoding, then chains of drafts that are right with each probability; greedy.

    In float32 the tokens must be the plain ones; in half precision near-ties may fall otherwise, and only the
    speed counts.

    Raises:
        ImportError: the project's own dependencies are missing.
    """
    from stages.decoding.drafters import OracleDrafter

    target = random_target(size)
    generator = torch.Generator().manual_seed(5)
    runs: list[Row] = []
    for batch in size.engine_batches:
        prompts = torch.randint(size.model.vocab, (batch, size.prompt), generator=generator).tolist()
        reference: list[list[int]] = []
        fastest = 0.0
        for loop in _LOOPS:
            found, outputs = _measured(engine_of(target, loop, batch), prompts, size.output)
            reference, fastest = reference or outputs, max(fastest, found["tokens/s"])
            runs.append({"batch": batch, "drafter": "none", "loop": loop} | found | {"of best plain": 1.0})
            _compare(report, size, f"none, {loop}, batch {batch}", outputs, reference)
        for row in runs[-len(_LOOPS) :]:
            row["of best plain"] = row["tokens/s"] / fastest
        for right in _RIGHT:
            oracle = OracleDrafter(right, size.model.vocab)
            for prompt, output in zip(prompts, reference, strict=True):
                oracle.know(prompt, output)
            for loop in _LOOPS:
                engine = engine_of(target, loop, batch, oracle, _TREE)
                found, outputs = _measured(engine, prompts, size.output)
                row = {"batch": batch, "drafter": f"oracle:{right}", "loop": loop} | found
                runs.append(row | {"of best plain": found["tokens/s"] / fastest})
                _compare(report, size, f"oracle:{right}, {loop}, batch {batch}", outputs, reference)
    report.engine = {"model": asdict(size.model), "tree": _TREE, "runs": runs}


def engine_of(
    target: Target,
    loop: Loop,
    slots: int,
    drafter: Drafter | None = None,
    tree: str = "none",
    layers: tuple[int, int, int] | None = None,
) -> Engine:
    """An engine whose sequences are all in this loop, on a CPU too."""
    from stages.decoding import Engine, FixedPlanner, TreeConfig

    planner = FixedPlanner(TreeConfig.parse(tree))
    engine = Engine(target, slots=slots, layers=layers, drafter=drafter, planner=planner, overlap=True)
    assert engine.device is not None
    engine.device.overlap = loop == "overlapped"
    if loop == "host":
        engine.device = None
    return engine


def _compare(
    report: Report, size: Size, name: str, outputs: list[list[int]], reference: list[list[int]]
) -> None:
    if size.dtype == torch.float32:
        found = f"{sum(map(len, outputs))} tokens"
        report.check(f"engine: {name} gives the plain tokens", outputs == reference, found)


def _measured(engine: Engine, prompts: list[list[int]], output: int) -> tuple[Row, list[list[int]]]:
    """Tokens a second over all sequences, from when the last prompt was read, and the outputs; the second of
    two runs."""
    from stages.decoding import GenerationRequest, SamplingParams

    params = SamplingParams(max_new_tokens=output, ignore_eos=True)
    for _ in range(2):  # the first builds what it needs
        for i, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(str(i), prompt, params))
        outputs: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        stats = {}
        begun, before, reading = 0.0, 0, True
        while engine.busy:
            for emission in engine.step():
                outputs[emission.id] += emission.tokens
                stats[emission.id] = emission.stats
            if reading:
                begun, before = time.perf_counter(), sum(map(len, outputs.values()))
                reading = not all(outputs.values())
        took = time.perf_counter() - begun
    tokens, steps = sum(s.tokens for s in stats.values()), sum(s.steps for s in stats.values())
    after = sum(map(len, outputs.values())) - before
    return {"tokens/s": after / took, "tokens/step": tokens / steps}, list(outputs.values())


def random_target(size: Size) -> Target:
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
