"""Describes ops in plain words, for readers who know neither FX nor ATen: (group, what it does)."""

from __future__ import annotations

Words = tuple[str, str]

GROUPS = {
    "matmul": "Matrix products: nearly all of the weights, and of the time",
    "attention": "Attention: each token looks at the tokens before it",
    "cache": "The KV cache: keys and values of earlier tokens, in blocks",
    "recurrent": "Recurrence: one state per layer that summarizes all earlier tokens",
    "norm": "Normalization",
    "math": "Elementwise arithmetic",
    "shape": "Shape changes: no value changes, and some cost nothing at all",
    "lookup": "Table lookups",
    "sample": "Choosing the next token",
}

_WORDS: dict[str, Words] = {
    "linear": ("matmul", "multiply by a weight matrix"),
    "fused_linear": ("matmul", "multiply by a weight matrix, with the norm and the sum around it"),
    "norm_add_linear": (
        "matmul",
        "RMSNorm, add to the residual stream, multiply by a weight matrix",
    ),
    "add_linear": ("matmul", "multiply by a weight matrix, and add to the residual stream"),
    "quantized_linear": ("matmul", "multiply by a weight matrix in 4 to 8 bits"),
    "norm_add_quantized_linear": (
        "matmul",
        "RMSNorm, add to the residual stream, multiply by a weight matrix in 4 to 8 bits",
    ),
    "fused_quantized_linear": (
        "matmul",
        "multiply by a weight matrix in 4 to 8 bits, with the norm and the sum around it",
    ),
    "mm": ("matmul", "multiply two matrices"),
    "bmm": ("matmul", "multiply matrices, batch by batch"),
    "matmul": ("matmul", "multiply two matrices"),
    "addmm": ("matmul", "multiply by a weight matrix and add a bias"),
    "_linear_pointwise": ("matmul", "multiply by a prepacked weight matrix"),
    "expert_linear": ("matmul", "multiply by the weight matrix of each token's expert"),
    "quantized_expert_linear": (
        "matmul",
        "multiply by the weight matrix in 4 to 8 bits of each token's expert",
    ),
    "choose_experts": ("math", "choose each token's experts"),
    "route": ("math", "scale every token to unit size, and choose its experts"),
    "sum_experts": ("math", "add the results of each token's experts"),
    "sum_expert_linear": ("matmul", "multiply by each token's experts, and add their results"),
    "sum_quantized_expert_linear": (
        "matmul",
        "multiply by each token's experts in 4 to 8 bits, and add their results",
    ),
    "sort_experts": ("math", "sort the tokens by expert"),
    "add_lora": ("matmul", "add each adapter's part"),
    "attention": ("attention", "attend to all earlier tokens of one sequence (a marker)"),
    "paged_attention": ("attention", "attend to the cached tokens of each request"),
    "latent_attention": ("attention", "attend to the cached latents of each request"),
    "encoder_attention": ("attention", "attend to all tokens of each sequence"),
    "choose_keys": ("attention", "choose the cached tokens to attend to (sparse indexer)"),
    "choose_blocks": ("attention", "choose blocks of cached tokens to attend to (sparse indexer)"),
    "write_kv": ("cache", "write keys and values to the cache"),
    "rope_write_latent": ("cache", "rotate queries and the shared key, and write the latent cache"),
    "rope_write": ("cache", "rotate queries and keys by position, and write the cache"),
    "rope_attention": ("attention", "rotate by position, write the cache, and attend to it"),
    "rope_latent_attention": ("attention", "rotate by position, write latents, and attend to them"),
    "causal_conv": ("recurrent", "mix each token with the few before it (short convolution)"),
    "delta_rule": ("recurrent", "update the layer's state and read it (delta rule)"),
    "selective_scan": ("recurrent", "update the layer's state and read it (state space)"),
    "conv_delta_rule": ("recurrent", "short convolution, then the delta rule"),
    "conv_scan": ("recurrent", "short convolution, then the state space"),
    "decayed_softmax": ("recurrent", "update the layer's state and read it"),
    "running_max": ("recurrent", "the maximum over the sequence so far (max pooling)"),
    "linear_recurrence": ("recurrent", "update the layer's state and read it"),
    "gated_rms_norm": ("norm", "scale every head or group to unit size, and apply a gate"),
    "rms_norm": ("norm", "scale every token to unit size (RMSNorm)"),
    "add_rms_norm": ("norm", "add to the residual stream, then RMSNorm"),
    "norm_add": ("norm", "RMSNorm, then add to the residual stream"),
    "norm_add_norm": ("norm", "RMSNorm, add to the residual stream, then RMSNorm"),
    "layer_norm": ("norm", "center and scale every token (LayerNorm)"),
    "add_layer_norm": ("norm", "add to the residual stream, then LayerNorm"),
    "rsqrt": ("math", "one over the square root"),
    "mean": ("math", "average over a dimension"),
    "pow": ("math", "raise to a power"),
    "act_mul": ("math", "activation of one half times the other half"),
    "activate": ("math", "activation"),
    "silu": ("math", "activation (SiLU)"),
    "gelu": ("math", "activation (GELU)"),
    "relu": ("math", "activation (ReLU)"),
    "sigmoid": ("math", "activation (sigmoid)"),
    "softmax": ("math", "turn scores into shares of one"),
    "tanh": ("math", "squash between -1 and 1"),
    "add": ("math", "add"),
    "sub": ("math", "subtract"),
    "mul": ("math", "multiply"),
    "div": ("math", "divide"),
    "neg": ("math", "change the sign"),
    "cos": ("math", "cosine: the angle of a position"),
    "sin": ("math", "sine: the angle of a position"),
    "exp": ("math", "e to the power of the value"),
    "softplus": ("math", "a smooth step up from zero"),
    "clamp": ("math", "keep within bounds"),
    "maximum": ("math", "the larger of two"),
    "sum": ("math", "sum over a dimension"),
    "topk": ("math", "the largest few, to choose experts"),
    "to": ("shape", "change the number format"),
    "_to_copy": ("shape", "change the number format"),
    "view": ("shape", "view the same numbers in another shape"),
    "reshape": ("shape", "view the same numbers in another shape"),
    "transpose": ("shape", "swap two dimensions"),
    "permute": ("shape", "swap dimensions"),
    "unsqueeze": ("shape", "add a dimension of size one"),
    "squeeze": ("shape", "drop a dimension of size one"),
    "expand": ("shape", "repeat without copying"),
    "slice": ("shape", "take a part"),
    "split": ("shape", "cut into parts"),
    "split_with_sizes": ("shape", "cut into parts"),
    "chunk": ("shape", "cut into equal parts"),
    "cat": ("shape", "join parts"),
    "contiguous": ("shape", "make contiguous in memory"),
    "flatten": ("shape", "join dimensions"),
    "select": ("shape", "take one"),
    "getitem": ("shape", "take one of several results"),
    "sym_size": ("shape", "the number of tokens"),
    "quantized_embedding": ("lookup", "look up each token's vector, in 4 to 8 bits"),
    "embedding": ("lookup", "look up each token's vector"),
    "index_select": ("lookup", "look up rows of a table"),
    "index": ("lookup", "look up by index"),
    "gather": ("lookup", "look up by index"),
    "arange": ("lookup", "count up"),
    "sample_rows": ("sample", "apply penalties, biases and masks, and draw the next token"),
    "process_logits": ("sample", "apply penalties, biases and masks to the logits"),
    "sample": ("sample", "draw the next token"),
}


def words_of(op: str) -> Words:
    """The words for an op's bare name, such as `linear` for `aten.linear.default`."""
    return _WORDS.get(op, ("math", op.replace("_", " ").strip()))


def bare_name(target: str) -> str:
    """`aten.add.Tensor` -> `add`, `llmc_cpu.linear.default` -> `linear`."""
    if "getitem" in target:
        return "getitem"
    parts = target.split(".")
    return parts[1] if len(parts) > 2 else parts[-1]
