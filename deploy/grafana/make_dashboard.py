"""Write the Grafana dashboard `llmc.json` next to this file.

Run `python -P deploy/grafana/make_dashboard.py`. All panels are in the list below. A test
regenerates the dashboard and compares it, and checks that a server exports every metric.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("llmc.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = '{model_name=~"$model", instance=~"$instance"}'
HTTP = '{instance=~"$instance"}'
QUANTILES = (0.5, 0.95, 0.99)


def rate(name: str, by: str = "", where: str = WHERE) -> str:
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({name}{where}[$__rate_interval]))"


def quantiles(name: str) -> list[tuple[str, str]]:
    found = [
        (f"p{q * 100:g}", f"histogram_quantile({q}, {rate(f'{name}_bucket', 'le')})")
        for q in QUANTILES
    ]
    return [*found, ("mean", f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}")]


def mean(name: str) -> str:
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


# (row, [(title, unit, [(legend, query), ...]), ...])
ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Traffic",
        [
            (
                "Requests",
                "reqps",
                [("{{finished_reason}}", rate("llmc:request_success_total", "finished_reason"))],
            ),
            (
                "Tokens",
                "short",
                [
                    ("prompt /s", rate("llmc:prompt_tokens_total")),
                    ("prompt, cached /s", rate("llmc:prompt_tokens_cached_total")),
                    ("generated /s", rate("llmc:generation_tokens_total")),
                ],
            ),
            (
                "HTTP responses",
                "reqps",
                [
                    (
                        "{{handler}} {{status}}",
                        rate("llmc:http_requests_total", "handler, status", HTTP),
                    )
                ],
            ),
            (
                "Rejected",
                "reqps",
                [("{{reason}}", rate("llmc:admission_rejections_total", "reason"))],
            ),
        ],
    ),
    (
        "Latency",
        [
            ("Time to first token", "s", quantiles("llmc:time_to_first_token_seconds")),
            ("Inter-token latency", "s", quantiles("llmc:inter_token_latency_seconds")),
            ("End to end", "s", quantiles("llmc:e2e_request_latency_seconds")),
            (
                "Where a request's time goes, mean",
                "s",
                [
                    (phase, mean(f"llmc:request_{phase}_time_seconds"))
                    for phase in ("queue", "prefill", "decode")
                ],
            ),
        ],
    ),
    (
        "Engine",
        [
            (
                "Requests in the engine",
                "short",
                [
                    ("running", f"sum (llmc:num_requests_running{WHERE})"),
                    (
                        "waiting: {{reason}}",
                        f"sum by (reason) (llmc:num_requests_waiting_by_reason{WHERE})",
                    ),
                ],
            ),
            ("KV cache used", "percentunit", [("used", f"max (llmc:kv_cache_usage_perc{WHERE})")]),
            (
                "Prefix cache hit rate",
                "percentunit",
                [
                    (
                        "hits",
                        f"{rate('llmc:prefix_cache_hits_total')} / "
                        f"{rate('llmc:prefix_cache_queries_total')}",
                    )
                ],
            ),
            (
                "Tokens per step",
                "short",
                [
                    ("mean", mean("llmc:iteration_tokens_total")),
                    ("steps /s", rate("llmc:engine_steps_total")),
                ],
            ),
            (
                "Preemptions",
                "ops",
                [
                    ("preempted", rate("llmc:num_preemptions_total")),
                    ("swapped", rate("llmc:num_swaps_total")),
                ],
            ),
            (
                "Draft tokens accepted",
                "percentunit",
                [
                    (
                        "accepted",
                        f"{rate('llmc:spec_decode_num_accepted_tokens_total')} / "
                        f"{rate('llmc:spec_decode_num_draft_tokens_total')}",
                    )
                ],
            ),
            (
                "Failed steps, steps that waited for a compiler or had no CUDA graph, wasted rows",
                "ops",
                [
                    ("failed", rate("llmc:failed_engine_steps_total")),
                    ("compiled", rate("llmc:runtime_compiles_total")),
                    ("without a graph", rate("llmc:eager_steps_total")),
                    ("wasted rows", rate("llmc:wasted_row_steps_total")),
                ],
            ),
        ],
    ),
    (
        "Requests",
        [
            ("Prompt tokens", "short", quantiles("llmc:request_prompt_tokens")),
            ("Cached prompt tokens", "short", quantiles("llmc:request_cached_tokens")),
            ("Generated tokens", "short", quantiles("llmc:request_generation_tokens")),
            ("Preemptions per request", "short", quantiles("llmc:request_num_preemptions")),
        ],
    ),
    (
        "Processes",
        [
            ("Up", "short", [("{{process}}", f"llmc:process_up{WHERE}")]),
            ("Memory", "bytes", [("{{process}}", f"llmc:process_resident_memory_bytes{WHERE}")]),
            (
                "CPU cores",
                "short",
                [("{{process}}", rate("llmc:process_cpu_seconds_total", "process"))],
            ),
            (
                "Restarts",
                "short",
                [("{{process}}", f"llmc:process_restarts_total{WHERE}")],
            ),
        ],
    ),
]


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        y += 1
        for i, (name, unit, queries) in enumerate(row):
            panels.append(_panel(name, unit, queries, x=i % 2 * 12, y=y + i // 2 * 8))
        y += (len(row) + 1) // 2 * 8
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": "llmc",
        "title": "llmc",
        "description": "Traffic, latency and saturation of llmc servers.",
        "tags": ["llmc"],
        "schemaVersion": 39,
        "version": 1,
        "id": None,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                _variable("model", "Model", "model_name"),
                _variable("instance", "Instance", "instance"),
            ]
        },
        "panels": panels,
    }


def _panel(
    title: str, unit: str, queries: list[tuple[str, str]], *, x: int, y: int
) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": x, "y": y},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": name}
            for i, (name, query) in enumerate(queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never"},
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _variable(name: str, label: str, of: str) -> dict[str, Any]:
    query = f"label_values(llmc:num_requests_running, {of})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
