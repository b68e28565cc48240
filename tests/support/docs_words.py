"""What the tables of docs/ say and code does not: units, ranges, one sentence a field."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.structured_outputs import StructuredOutputs

# flag -> its value with the unit; every flag that takes a number is here
UNITS = {
    "--max-model-len": "N tokens",
    "--max-num-seqs": "N sequences",
    "--max-num-batched-tokens": "N tokens",
    "--max-queue": "N requests",
    "--block-size": "N tokens",
    "--kv-cache-memory": "BYTES (`512M`, `2G`)",
    "--speculative-config": "JSON",
    "--swap-space": "BYTES (`512M`, `2G`)",
    "--gpu-memory-utilization": "share, 0 to 1",
    "--opt-level": "0 to 3",
    "--memory": "BYTES (`24GiB`)",
    "--bandwidth": "GB/s",
    "--longest-prompt": "N tokens",
    "--cuda-graph-buckets": "sequences, with commas",
    "--seed": "integer",
    "--port": "0 to 65535",
    "--shutdown-timeout": "seconds",
    "--stream-interval": "N tokens",
    "--api-workers": "N processes",
    "--temperature": "at least 0",
    "--top-p": "above 0, to 1",
    "--top-k": "N tokens",
    "--min-p": "0 to 1",
    "--max-tokens": "N tokens",
    "--num-prompts": "N requests",
    "--random-input-len": "N tokens",
    "--random-output-len": "N tokens",
    "--random-range-ratio": "share, 0 to 1",
    "--random-prefix-len": "N tokens",
    "--input-len": "N tokens",
    "--output-len": "N tokens",
    "--num-warmups": "N requests",
    "--batch-size": "N requests",
    "--num-iters": "N batches",
    "--num-iters-warmup": "N batches",
    "--ready-check-timeout-sec": "seconds",
    "--request-rate": "requests a second",
    "--burstiness": "above 0",
    "--max-concurrency": "N requests",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A field of SamplingParams. `low` and `high` are accepted, `outside` is refused."""

    range: str
    meaning: str
    low: object = None
    high: object = None
    outside: tuple[object, ...] = ()


SAMPLING = {
    "n": Words(
        range="1 to 128",
        low=1,
        high=128,
        outside=(0, 129, 1.0, True),
        meaning="Completions of each prompt.",
    ),
    "best_of": Words(
        range="n to 128",
        low=1,
        high=128,
        outside=(0, 129, 2.0, True),
        meaning="Generate so many completions and return the n with the highest sum of "
        "log-probabilities, at the end. `n` when absent.",
    ),
    "temperature": Words(
        range="0 to 100",
        low=0,
        high=100.0,
        outside=(-0.1, 100.5, float("nan"), "1"),
        meaning="0 is greedy; below 1 sharper, above 1 flatter.",
    ),
    "top_p": Words(
        range="(0, 1]",
        low=1e-6,
        high=1,
        outside=(0.0, 1.01),
        meaning="Only the likeliest tokens that together have this probability.",
    ),
    "top_k": Words(
        range="positive; 0 or -1: off",
        low=-1,
        high=2**31 - 1,
        outside=(-2, 1.5),
        meaning="Only the k likeliest tokens.",
    ),
    "min_p": Words(
        range="0 to 1",
        low=0.0,
        high=1.0,
        outside=(-0.1, 1.1),
        meaning="Only tokens with at least this share of the likeliest one's probability.",
    ),
    "presence_penalty": Words(
        range="-2 to 2",
        low=-2.0,
        high=2.0,
        outside=(-2.1, 2.1),
        meaning="Taken off the logit of each token that the output has already.",
    ),
    "frequency_penalty": Words(
        range="-2 to 2",
        low=-2.0,
        high=2.0,
        outside=(-2.1, 2.1),
        meaning="The same, times how often the output has it.",
    ),
    "repetition_penalty": Words(
        range="(0, 10]",
        low=1e-6,
        high=10.0,
        outside=(0.0, 10.1),
        meaning="Above 1, tokens of the prompt and the output become less likely.",
    ),
    "logit_bias": Words(
        range="at most 300 token ids, each -100 to 100",
        low={0: -100.0},
        high={7: 100.0},
        outside=({0: 100.5}, {-1: 1.0}, dict.fromkeys(range(301), 1.0)),
        meaning="Added to the logits of these tokens.",
    ),
    "allowed_token_ids": Words(
        range="token ids, at least one",
        low=[0],
        high=[1, 2],
        outside=([], [-1]),
        meaning="Only these tokens may be sampled.",
    ),
    "seed": Words(
        range="64-bit integer",
        low=-(2**63),
        high=2**63 - 1,
        outside=(2**63, 0.5),
        meaning="The same seed, the same output; without one it is drawn from the engine's.",
    ),
    "max_tokens": Words(
        range="positive; None: until the context is full",
        low=1,
        high=2**31 - 1,
        outside=(0, 1.5),
        meaning="Most tokens of one completion.",
    ),
    "min_tokens": Words(
        range="0 to max_tokens",
        low=0,
        high=16,
        outside=(-1, 17),
        meaning="No stop token or stop string ends the text before.",
    ),
    "stop": Words(
        range="a string or at most 16, each 1 to 1024 characters",
        low="\n",
        high=["a" * 1024] * 16,
        outside=("", ["x"] * 17, "a" * 1025),
        meaning="Text that ends the output; not part of it.",
    ),
    "stop_token_ids": Words(
        range="token ids",
        low=[],
        high=[2**31 - 1],
        outside=([-1],),
        meaning="Tokens that end the output.",
    ),
    "include_stop_str_in_output": Words(
        range="",
        meaning="Keep the stop string or stop token in the text.",
    ),
    "ignore_eos": Words(range="", meaning="Go on after the model's end token."),
    "logprobs": Words(
        range="0 to 20",
        low=0,
        high=20,
        outside=(-1, 21),
        meaning="Alternatives to list for each output token; 0: the chosen one alone.",
    ),
    "prompt_logprobs": Words(
        range="0 to 20",
        low=0,
        high=20,
        outside=(-1, 21, True),
        meaning="The same for each token of the prompt but the first, computed with it. Such a "
        "prompt does not read the prefix cache.",
    ),
    "bad_words": Words(
        range="at most 64 texts",
        low=[" "],
        high=["a"] * 64,
        outside=([""], ["a"] * 65, [1]),
        meaning="Texts that the output must not contain, as they begin a text and as they follow "
        "a space; each spelling at most 16 tokens and all at most 64.",
    ),
    "bad_words_token_ids": Words(
        range="at most 64 lists of 1 to 16 token ids",
        low=[[0]],
        high=[[2**31 - 1] * 16] * 64,
        outside=([[-1]], [[True]]),
        meaning="The same as token ids: the last of them is not drawn after the others.",
    ),
    "extra_args": Words(
        range="at most 16 names",
        low={"a": 1, "b": 0.5, "c": True, "d": "text"},
        high={"x" * 64: ["t" * 1024] * 256},
        outside=(
            {"a": None},
            {"a": {}},
            {"a": [[1]]},
            {"a": float("nan")},
            {"a": [float("inf")]},
            {"a": 2**63},
            {"a": "t" * 1025},
            {"a": [1] * 257},
            {"": 1},
            {"x" * 65: 1},
            {str(i): i for i in range(17)},
            [("a", 1)],
        ),
        meaning="For logits processors of yours: a number, a bool, a text of at most 1024 "
        "characters, or a list of at most 256 of these for each name. A name that no processor "
        "knows is refused.",
    ),
    "structured_outputs": Words(
        range="a `StructuredOutputs`",
        low=StructuredOutputs(choice=["a"]),
        high=StructuredOutputs(json_object=True),
        outside=("[a-z]", {"regex": "a"}),
        meaning="The grammar that the output follows: one of `json` (a schema), `json_object`, "
        "`regex`, `choice` and `grammar`. It ends when the grammar allows nothing more, even "
        "with `ignore_eos` or before `min_tokens`.",
    ),
    "skip_special_tokens": Words(range="", meaning="Leave control tokens out of the text."),
    "spaces_between_special_tokens": Words(range="", meaning="Taken for compatibility; no effect."),
    "detokenize": Words(range="", meaning="False: token ids only, no text; excludes `stop`."),
}

# field of ServerSettings -> (unit, what happens at the limit)
LIMITS = {
    "max_body_bytes": ("bytes", "A larger body is a 413."),
    "max_header_bytes": ("bytes", "Larger headers are a 431."),
    "max_headers": ("headers", "More are a 431."),
    "body_timeout_s": ("s", "A body that is not there by then is a 408."),
    "keep_alive_s": ("s", "A stream that was quiet so long gets a comment line."),
    "stalled_reader_s": (
        "s",
        "A reader that took nothing for so long is cut, its request aborted.",
    ),
    "idle_connection_s": ("s", "A connection without a request is closed."),
    "shutdown_timeout_s": ("s", "What still runs so long after SIGTERM is dropped."),
}
