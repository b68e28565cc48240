"""Pages of lists, as OpenAI's API cuts them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from llmc.server.errors import ApiError


def list_page(
    request: Request, found: list[dict[str, Any]], *, most: int, default: int | None = None
) -> dict[str, Any]:
    """One page of a list, newest first, as selected by `limit`, `after` and `order`.

    `most`: the maximum `limit`. `default`: that of a request without one, if it is not `most`.
    Raises ApiError 400 for an invalid value.
    """
    query = request.query_params
    limit = query.get("limit", str(default or most))
    after, order = query.get("after"), query.get("order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 8 and 1 <= int(limit) <= most):
        raise ApiError(400, f"limit must be from 1 to {most}, got {limit[:80]!r}", param="limit")
    if order not in (None, "asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {order!r:.80}", param="order")
    if order == "asc":
        found = found[::-1]
    if after is not None:
        places = [i for i, one in enumerate(found) if one["id"] == after]
        if not places:
            raise ApiError(400, f"after: there is no {after[:80]!r}", param="after")
        found = found[places[0] + 1 :]
    shown = found[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }
