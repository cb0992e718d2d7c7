"""A two-layer random Llama with a tokenizer trained on the spot: any machine serves it, and its outputs show every wrong block of KV."""

from __future__ import annotations

import random
from pathlib import Path

NAME = "random-llama"
VOCABULARY = 2048
CONTEXT_TOKENS = 2048
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def text(seed: str, words: int = 120) -> str:
    """Words that no other seed gives in this order: about 1.5 tokens each."""
    chance = random.Random(seed)
    return " ".join("".join(chance.choice("bdfgklmnprstvz") + chance.choice("aeiou") for _ in range(2)) for _ in range(words))


def make(folder: Path) -> None:
    """Write model and tokenizer, unless they are there. Weights are wide enough that a wrong key changes the next token."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([text("vocabulary", 20_000)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.6,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
