"""N-gram speculative decoding: the same answers, in fewer steps where text repeats.

python examples/speculation.py [MODEL]
"""

import sys

from llmc import LLM, SamplingParams

PROMPT = "one two three four one two three four one two three four one two"


def main(model: str | None = None) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    with LLM(model, opt_level=0) as llm:
        [plain] = llm.generate(PROMPT, sampling)
    with LLM(model, opt_level=0, speculative_config=ngram) as llm:
        [drafted] = llm.generate(PROMPT, sampling)
        stats = llm.stats()
    print("the same tokens:", plain.outputs[0].token_ids == drafted.outputs[0].token_ids)
    print(f"accepted {stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
