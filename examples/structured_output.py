"""Answers that follow a grammar: a JSON schema, and one of several choices.

python examples/structured_output.py [MODEL]
"""

import json
import sys

from llmc import LLM, SamplingParams, StructuredOutputsParams

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "is_capital"],
    "additionalProperties": False,
}


def main(model: str | None = None) -> None:
    with LLM(model, opt_level=0) as llm:
        as_json = SamplingParams(
            temperature=0.0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=CITY)
        )
        [output] = llm.chat([{"role": "user", "content": "Describe Paris."}], as_json)
        print(json.loads(output.outputs[0].text))

        choice = StructuredOutputsParams(choice=["small", "medium", "large"])
        sized = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=choice)
        [output] = llm.generate("How large is an elephant? Answer:", sized)
        print(output.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
