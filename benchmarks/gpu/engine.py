"""The engine on a target of random weights, plain and with drafts of a known acceptance, in all its loops:
the host's cycles, the device's, and the device's with the next one launched ahead."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from functools import cache
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
LOOPS: tuple[Loop, ...] = ("host", "device", "overlapped")
_RIGHT = (0.6, 0.8, 0.9)
_TREE = "chain:depth=4"


def project_missing(report: Report) -> bool:
    """Whether the project's own dependencies are; the report says so."""
    try:
        import stages.decoding
        import stages.targets  # noqa: F401
    except ImportError as error:
        report.engine = {"left_out": f"the project is not installed: {error}"}
        return True
    return False


def run_engine(report: Report, size: Size) -> None:
    """Plain decoding, then chains of drafts that are right with each probability; greedy.

    In float32 the tokens must be the plain ones; in half precision near-ties may fall otherwise, and only the
    speed counts.
    """
    if project_missing(report):
        return
    from stages.decoding.drafters import OracleDrafter

    target = random_target(size)
    generator = torch.Generator().manual_seed(5)
    runs: list[Row] = []
    report.engine = {"model": asdict(size.model), "tree": _TREE, "runs": runs}
    for batch in size.engine_batches:
        prompts = torch.randint(size.model.vocab, (batch, size.prompt), generator=generator).tolist()
        reference: list[list[int]] = []

        def measure(
            name: str,
            loop: Loop,
            drafter: Drafter | None = None,
            batch: int = batch,
            prompts: list[list[int]] = prompts,
            reference: list[list[int]] = reference,
        ) -> None:
            with report.attempt(f"engine: {name}, {loop}, batch {batch}"):
                engine = engine_of(target, loop, batch, drafter, _TREE if drafter else "none")
                found, outputs = _measured(engine, prompts, size.output)
                reference[:] = reference or outputs
                runs.append({"batch": batch, "drafter": name, "loop": loop} | found)
                if size.dtype == torch.float32:
                    same, count = outputs == reference, sum(map(len, outputs))
                    report.check(
                        f"engine: {name}, {loop}, batch {batch} gives the plain tokens",
                        same,
                        f"{count} tokens",
                    )

        for loop in LOOPS:
            measure("none", loop)
        for right in _RIGHT:
            oracle = OracleDrafter(right, size.model.vocab)
            for prompt, output in zip(prompts, reference, strict=False):
                oracle.know(prompt, output)
            for loop in LOOPS:
                measure(f"oracle:{right}", loop, oracle)
        mine = [row for row in runs if row["batch"] == batch]
        fastest = max((row["tokens/s"] for row in mine if row["drafter"] == "none"), default=math.nan)
        for row in mine:
            row["of best plain"] = row["tokens/s"] / fastest


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


@cache
def random_target(size: Size) -> Target:
    """A Llama of random weights, the same for all parts."""
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
