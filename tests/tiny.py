"""A tiny random target as a local Hugging Face folder: real files, no network, quick to make."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def make_tiny_target(
    path: str | Path,
    *,
    seed: int = 0,
    vocab: int = 512,
    arch: str = "llama",
    layers: int = 8,
    hidden: int = 64,
    max_length: int = 512,
    tied: bool = False,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Writes config, float32 weights, tokenizer and chat template to `path`.

    The same arguments give the same files. Every id of the vocabulary is a real token and any text can be
    encoded: 256 bytes, pairs of characters, three special tokens at the end. The end-of-turn token wins at
    about 4 % of positions, so that greedy answers end both ways ("stop" and "length"). Needs vocab >= 259,
    and layers >= 7 for distinct feature layers.
    """
    path = Path(path)
    tokenizer = make_tiny_tokenizer(vocab, max_length, chat_template)
    model = _model(arch, seed, vocab, layers, hidden, max_length, tied, tokenizer)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_tiny_tokenizer(
    vocab: int, max_length: int, chat_template: str | None = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `vocab` ids, the last three of them special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "eatoinshrdlu" + string.digits + string.ascii_lowercase
    pairs = dict.fromkeys((a, b) for a in "\u0120" + letters for b in letters)  # \u0120 stands for a space
    merges = list(pairs)[: vocab - len(alphabet) - len(SPECIAL_TOKENS)]
    symbols = [*alphabet, *(a + b for a, b in merges), *SPECIAL_TOKENS]
    if len(symbols) != vocab:
        raise ValueError(
            f"vocab {vocab}: the tiny tokenizer can fill 259 to {len(alphabet) + len(pairs) + 3} ids"
        )
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _model(
    arch: str,
    seed: int,
    vocab: int,
    layers: int,
    hidden: int,
    max_length: int,
    tied: bool,
    tokenizer: PreTrainedTokenizerFast,
) -> torch.nn.Module:
    eos = tokenizer.eos_token_id
    config = CONFIGS[arch](
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        initializer_range=0.15,  # wide enough that the context decides the next token
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        probe = torch.randint(0, vocab, (16, 32))
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=tokenizer.pad_token_id)
    with torch.no_grad():
        logits = model(probe).logits.flatten(0, 1)  # [512, vocab]
        own = logits[:, eos].clone()
        logits[:, eos] = -torch.inf
        needed = (logits.max(dim=-1).values / own)[own > 0]  # factor at which <|im_end|> would win there
        model.lm_head.weight[eos] *= needed.quantile(0.08)  # own > 0 at about half of the positions
    return model


def write_jsonl(path: str | Path, rows: list[dict]) -> Path:
    """Writes one JSON object a line, non-ASCII characters as they are (U+2028 too)."""
    path = Path(path)
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    return path
