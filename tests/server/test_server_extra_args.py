"""`extra_args` of requests: what a logits processor refuses is a 400, whatever the process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from live_server import live_server

from llmc.errors import InvalidRequestError


class Picky:
    """Stands for what is made of a user's logits processors."""

    def __init__(self) -> None:
        self.seen: list[Mapping[str, Any]] = []

    def begin(self, args: Mapping[str, Any], prompt_token_ids: Sequence[int]) -> dict[str, bytes]:
        self.seen.append(args)
        if args["level"] != 3:
            raise InvalidRequestError("level must be 3", param="extra_args")
        return {}


def test_arguments_reach_the_processor_which_may_refuse_them() -> None:
    picky = Picky()
    with live_server(extra_args=("level", "words")) as live:
        engine = live.scripted.engine
        engine._features = dataclasses.replace(engine._features, row_states=picky)
        good = {"level": 3, "words": ["a", 0.5, True]}
        for name in ("extra_args", "vllm_xargs"):
            assert live.complete(**{name: good}).status_code == 200
        assert picky.seen == [good, good]
        for refused in (
            live.complete(extra_args={"level": 2}),
            live.complete(extra_args={"level": 2}, n=2),
            live.complete(extra_args={"level": 2}, stream=True),
        ):
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["message"] == "level must be 3"
        unknown = live.complete(extra_args={"levle": 3})
        assert unknown.status_code == 400 and unknown.json()["error"]["param"] == "extra_args"
        known = "'levle', but the logits processors of this engine accept level, words"
        assert known in unknown.text
        assert live.complete().status_code == 200
