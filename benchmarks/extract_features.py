"""What extraction costs over the target's bare forward pass, whether memory stays flat, and what fp8 loses.

    python benchmarks/extract_features.py throughput --threads 2
    python benchmarks/extract_features.py memory
    python benchmarks/extract_features.py fp8 --conversations runs/larger/conversations

Throughput is measured in rounds. Each runs the same batches three times, in turning order: the decoder's
layers alone, the whole causal language model (logits of every token), and all of the extraction from reading
ids to a shard on disk. What is printed are medians over the rounds, by the clock and by CPU time; the latter
hardly minds what else the machine does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from stages.artifacts import Artifact, ArtifactWriter, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.features.config import FeatureSettings
from stages.features.extraction import Extraction, Extractor, plan_extraction
from stages.features.layout import shard_name as features_name
from stages.features.storage import FP8, StorageFormat, unpack
from stages.targets import Target, load_target

FORWARD_TOKENS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["throughput", "memory", "fp8"])
    parser.add_argument("--target", default="builtin:smollm2")
    parser.add_argument("--conversations", help="of that target; random tokens by default")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--storage-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=3, help="in a round")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="for memory")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="eagle-benchmark-") as folder:
        {"throughput": throughput, "memory": memory, "fp8": fp8}[options.what](options, Path(folder))


def throughput(options: argparse.Namespace, folder: Path) -> None:
    """Three ways over the same batches, interleaved."""
    target = load_target(options.target, "auto", options.dtype, decodes=False)
    needed = options.batches * FORWARD_TOKENS
    conversations = _conversations(options, target, folder, tokens=4 * needed)
    settings = FeatureSettings(storage_dtype=options.storage_dtype, shard_bytes=1, max_tokens=4 * needed)
    extraction = plan_extraction(settings, target, conversations)
    chosen = range(0, len(extraction.shards), max(1, len(extraction.shards) // options.batches))
    numbers = list(chosen)[: options.batches]  # a shard is a batch here
    inputs = [_padded(extraction, number) for number in numbers]
    tokens = sum(extraction.sizes[number].tokens for number in numbers)
    supervised = sum(extraction.sizes[number].supervised for number in numbers)
    shapes = ", ".join("x".join(map(str, ids.shape)) for ids in inputs)
    print(f"{options.target}, {options.dtype}, {options.threads} threads; batches of a round: {shapes},")
    print(f"{tokens:,} tokens, {supervised / tokens:.0%} of them supervised")

    with (
        extraction.running() as extractor,
        ArtifactWriter.open(str(folder / "features"), "features", {}) as writer,
    ):

        def layers_alone() -> None:
            for ids in inputs:
                target.decoder(input_ids=ids, use_cache=False)

        def whole_model() -> None:
            for ids in inputs:
                target.model(input_ids=ids, use_cache=False)

        def extract() -> None:
            for number in numbers:
                _write(extractor, number, writer)
            writer.flush()

        ways: dict[str, Callable[[], None]] = {
            "decoder layers alone": layers_alone,
            "whole model, all logits": whole_model,
            "extraction": extract,
        }
        times = _interleaved(ways, options.rounds)
    _report(times, tokens)


def _interleaved(ways: dict[str, Callable[[], None]], rounds: int) -> list[dict[str, tuple[float, float]]]:
    """Seconds by the clock and of CPU of each way in each round, after one round to warm up."""
    found = []
    for turn in range(rounds + 1):
        order = list(ways)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        seconds = {}
        for name in order:
            clock, cpu = time.perf_counter(), time.process_time()
            with torch.inference_mode():
                ways[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - clock, time.process_time() - cpu
        if turn:
            found.append(seconds)
    return found


def _report(times: list[dict[str, tuple[float, float]]], tokens: int) -> None:
    print(f"{'':26}{'tokens/s':>10}{'CPU ms/token':>14}{'extraction/this':>17}{'by CPU time':>13}")
    for name in times[0]:
        clock = statistics.median(seconds[name][0] for seconds in times)
        cpu = statistics.median(seconds[name][1] for seconds in times)
        ratio = statistics.median(seconds[name][0] / seconds["extraction"][0] for seconds in times)
        by_cpu = statistics.median(seconds[name][1] / seconds["extraction"][1] for seconds in times)
        print(f"{name:26}{tokens / clock:10,.0f}{1000 * cpu / tokens:14.3f}{ratio:17.3f}{by_cpu:13.3f}")


def _write(extractor: Extractor, number: int, writer: ArtifactWriter) -> None:
    shard = extractor.shard(number)
    name = features_name(len(writer.committed) * 1000 + number)
    writer.add_shard(name, shard.to_bytes(), rows=len(shard.row_ids), wait=False)


def memory(options: argparse.Namespace, folder: Path) -> None:
    """Resident memory of a long extraction, a line every tenth of it."""
    target = load_target(options.target, "auto", options.dtype, decodes=False)
    conversations = _conversations(options, target, folder, options.tokens)
    settings = FeatureSettings(
        storage_dtype=options.storage_dtype, shard_bytes=8 * 2**20, max_tokens=options.tokens
    )
    extraction = plan_extraction(settings, target, conversations)
    process, done, shown = psutil.Process(), 0, 0
    size = extraction.sizes[0].bytes / 2**20
    print(f"{extraction.plan.tokens:,} tokens in {len(extraction.shards)} shards of {size:.0f} MiB")

    def advance(tokens: int) -> None:
        nonlocal done, shown
        done += tokens
        if done * 10 // extraction.plan.tokens > shown:
            shown = done * 10 // extraction.plan.tokens
            print(f"{done:12,} tokens  {process.memory_info().rss / 2**20:8.1f} MiB", flush=True)

    with (
        extraction.running() as extractor,
        ArtifactWriter.open(str(folder / "features"), "features", {}) as writer,
    ):
        for number in range(len(extraction.shards)):
            shard = extractor.shard(number, advance)
            data = shard.to_bytes()
            writer.add_shard(features_name(number), data, rows=len(shard.row_ids), wait=False)


def fp8(options: argparse.Namespace, folder: Path) -> None:
    """Relative error of each state in fp8, and how often the rounded state's most likely token is another."""
    target = load_target(options.target, "auto", options.dtype, decodes=False)
    conversations = _conversations(options, target, folder, tokens=8 * FORWARD_TOKENS)
    extraction = plan_extraction(FeatureSettings(max_tokens=8 * FORWARD_TOKENS), target, conversations)
    storage = StorageFormat(FP8)
    changed = total = 0
    errors: dict[str, list[torch.Tensor]] = {"low": [], "mid": [], "high": [], "last": []}
    with extraction.running() as extractor:
        for number in range(len(extraction.plan.batches)):
            states = extractor.batch(number)
            low, mid, high = states.aux.unflatten(1, (3, -1)).unbind(1)
            for name, exact in zip(errors, (low, mid, high, states.last), strict=True):
                rounded = unpack(*storage.pack(exact, taps=1)).float()
                errors[name].append((rounded - exact.float()).norm(dim=1) / exact.float().norm(dim=1))
            last = unpack(*storage.pack(states.last, taps=1)).to(target.dtype)
            with torch.inference_mode():
                chosen = torch.cat([target.logits(part).argmax(-1) for part in last.split(256)])
            changed += int((chosen != states.target_argmax).sum())
            total += len(last)
    for name, parts in errors.items():
        error = torch.cat(parts)
        print(f"{name:5} relative error: median {error.median():.4f}, largest {error.max():.4f}")
    print(f"most likely token another: {changed} of {total} ({changed / total:.2%}); target_argmax is exact")


def _padded(extraction: Extraction, number: int) -> torch.Tensor:
    """Ids of the shape that a batch of one shard is run in."""
    indices = [i for batch in extraction.shards[number].batches for i in extraction.plan.batches[batch]]
    longest = max(extraction.plan.rows[i].length for i in indices)
    target = extraction.target
    return torch.randint(0, target.vocab_size, (len(indices), longest), device=target.device)


def _conversations(options: argparse.Namespace, target: Target, folder: Path, tokens: int) -> Artifact:
    if options.conversations:
        return open_artifact(options.conversations, "conversations")
    rng, left = random.Random(0), tokens
    rows: list[Conversation] = []
    while left > 0:
        prompt, answer = rng.randint(20, 140), rng.randint(40, 220)
        left -= prompt + answer
        ids = [rng.randrange(target.vocab_size) for _ in range(prompt + answer)]
        mask = [0] * prompt + [1] * answer
        rows.append(Conversation(str(len(rows)), "random", "", "", [], ids, mask, "length"))
    uri = str(folder / "conversations")
    with ArtifactWriter.open(uri, "conversations", {}, target=target.fingerprint) as writer:
        for number, start in enumerate(range(0, len(rows), 1000)):
            part = rows[start : start + 1000]
            writer.add_shard(shard_name(number), write_conversations(part), rows=len(part))
        writer.finish({})
    return open_artifact(uri, "conversations")


if __name__ == "__main__":
    main()
