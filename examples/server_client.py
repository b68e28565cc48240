"""A client of a running server that uses plain HTTP: one streamed chat.

llmc serve [MODEL] &
python examples/server_client.py [URL]
"""

import json
import sys

import httpx


def main(url: str = "http://127.0.0.1:8000") -> None:
    body = {
        "messages": [{"role": "user", "content": "Name three colors."}],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        if response.status_code != 200:
            raise SystemExit(response.read().decode())
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue  # a blank line, a keep-alive comment, or the end
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(event["error"]["message"])
            print(event["choices"][0]["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
