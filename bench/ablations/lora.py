"""Rows of LoRA: the cost of slots for requests without adapters, and eight adapters in a batch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch
from safetensors.torch import save_file

from bench.ablations.row import Figures, Row, in_turn
from bench.ablations.subject import LARGE, Bench, Subject, add
from llmc.lora_request import LoRARequest

REQUESTS, RANK = 8, 16


def _save_adapters(bench: Bench, subject: Subject) -> list[LoRARequest]:
    """Save one adapter per request, on every linear of the layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(subject.model))
    linears = {
        name: module.weight.shape
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "layers." in name
    }
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["all"]}
    made = []
    for number in range(1, REQUESTS + 1):
        folder = bench.folder()
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (channels, depth) in linears.items():
            for matrix, shape in (("A", (RANK, depth)), ("B", (channels, RANK))):
                drawn = 0.02 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = drawn.bfloat16()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        made.append(LoRARequest(f"adapter-{number}", number, str(folder)))
    return made


def _decode(bench: Bench, subject: Subject, adapters: Sequence[LoRARequest | None]) -> float:
    """Decoded tokens per second, one request per adapter, once all have started: excludes prompts
    and loading the adapters."""
    engine = subject.engine(adapters=subject.started.engine._features.adapters)
    for i, adapter in enumerate(adapters):
        add(engine, range(10 * i + 3, 10 * i + 19), bench.size(32, 8), adapter=adapter)
    started: set[str] = set()
    tokens, start = 0, time.perf_counter()
    while engine.has_work:
        updates = engine.step()
        if len(started) == len(adapters):
            tokens += sum(len(update.new_token_ids) for update in updates)
            continue
        started |= {update.request_id for update in updates}
        start = time.perf_counter()
    return tokens / (time.perf_counter() - start)


def _slots(bench: Bench) -> Figures:
    plain, slots, nobody = bench.large, bench.large_lora, [None] * REQUESTS
    note = f"{REQUESTS} requests decoding, none with an adapter; {REQUESTS} slots of rank {RANK}"
    return in_turn(
        lambda: _decode(bench, slots, nobody),
        lambda: _decode(bench, plain, nobody),
        bench.rounds,
        note=note,
    )


def _adapters(bench: Bench) -> Figures:
    subject = bench.large_lora
    adapters, nobody = _save_adapters(bench, bench.large_lora), [None] * REQUESTS
    note = f"{REQUESTS} requests decoding; rank {RANK} on every linear of the layers"
    return in_turn(
        lambda: _decode(bench, subject, adapters),
        lambda: _decode(bench, subject, nobody),
        bench.rounds,
        note=note,
    )


ROWS = (
    Row(
        name="lora-slots",
        what="LoRA for requests without an adapter",
        on="with slots for adapters",
        off="LoRA not enabled",
        unit="tokens/s",
        model=LARGE,
        better="higher",
        measure=_slots,
    ),
    Row(
        name="lora-8",
        what="eight LoRA adapters in one batch",
        on="each request its own",
        off="none",
        unit="tokens/s",
        model=LARGE,
        better="higher",
        measure=_adapters,
    ),
)
