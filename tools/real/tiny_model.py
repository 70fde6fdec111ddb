"""Writes a tiny llama model with random weights, for engines whose caches are to be seen at work.

    tiny_model.py gguf CORPUS OUT      a GGUF file with weights, for llama.cpp
    tiny_model.py hf CORPUS OUT        a Hugging Face folder without weights, for vLLM's dummy ones

The answers mean nothing; scheduling, attention and the prefix cache are the engine's own. The same
corpus gives the same vocabulary, in both forms. Needs tokenizers, and for gguf also gguf and numpy.
"""

import json
import os
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# 2 layers: computing 3,000 tokens takes a core about 0.7 s, as long as a large model on its GPUs
# takes for a few times as many.
LAYERS = 2
EMBEDDING = 256
FEED_FORWARD = 768
HEADS = 8
KV_HEADS = 2
HEAD = EMBEDDING // HEADS
VOCABULARY = 8192
CONTEXT = 32768
ROPE_BASE = 500000.0
NORM_EPSILON = 1e-5
SEED = 1

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BEGIN, _, END = range(len(SPECIAL))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(corpus):
    """A byte-level vocabulary, trained on the kind of text that is going to be asked."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train([corpus], trainer)
    return trained


def write_gguf(trained, out):
    import gguf
    import numpy

    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    control = [gguf.TokenType.CONTROL] * len(SPECIAL)
    normal = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]

    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name("tiny-random")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(control + normal)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    random = numpy.random.default_rng(SEED)

    def weights(name, rows, columns, scale=None):
        # So scaled, values neither grow nor vanish from layer to layer.
        scale = columns**-0.5 if scale is None else scale
        values = random.standard_normal((rows, columns), dtype=numpy.float32) * scale
        writer.add_tensor(f"{name}.weight", values.astype(numpy.float16))

    def norm(name):
        writer.add_tensor(f"{name}.weight", numpy.ones(EMBEDDING, dtype=numpy.float32))

    weights("token_embd", len(tokens), EMBEDDING, scale=1.0)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        norm(at + "attn_norm")
        weights(at + "attn_q", HEADS * HEAD, EMBEDDING)
        weights(at + "attn_k", KV_HEADS * HEAD, EMBEDDING)
        weights(at + "attn_v", KV_HEADS * HEAD, EMBEDDING)
        weights(at + "attn_output", EMBEDDING, HEADS * HEAD)
        norm(at + "ffn_norm")
        weights(at + "ffn_gate", FEED_FORWARD, EMBEDDING)
        weights(at + "ffn_up", FEED_FORWARD, EMBEDDING)
        weights(at + "ffn_down", EMBEDDING, FEED_FORWARD)
    norm("output_norm")
    weights("output", len(tokens), EMBEDDING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hf(trained, out):
    os.makedirs(out, exist_ok=True)
    trained.save(os.path.join(out, "tokenizer.json"))

    def write(name, content):
        with open(os.path.join(out, name), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)

    ends = {"bos_token_id": BEGIN, "eos_token_id": END}
    write("generation_config.json", {**ends, "temperature": 0.0})
    write(
        "config.json",
        {
            **ends,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": EMBEDDING,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": NORM_EPSILON,
            "rope_theta": ROPE_BASE,
            "torch_dtype": "float32",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
    )
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[BEGIN],
            "eos_token": SPECIAL[END],
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
        },
    )


if __name__ == "__main__":
    form, corpus, out = sys.argv[1:]
    {"gguf": write_gguf, "hf": write_hf}[form](tokenizer(corpus), out)
