"""Bodies of the routes that return vectors and scores, with the names that clients know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from llmc.engine.admission import MAX_CACHE_SALT
from llmc.pooling import Task
from llmc.server.protocol import Body, Int64

MAX_INPUTS = 2048  # texts of one call, as OpenAI's clients split them
MAX_TOKEN_VALUES = MAX_INPUTS * 4096  # in an answer with a vector of each token

Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
_CHAT: Mapping[str, tuple[Any, ...]] = {
    "messages": (None, []),
    "input_type": (None,),
    "embedding_types": (None, ["float"]),
    "max_tokens_per_doc": (None,),
    "max_chunks_per_doc": (None,),
    "rank_fields": (None,),
    "mm_processor_kwargs": (None,),
}


class PooledBody(Body):
    """What all of them share."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = _CHAT

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    user: Any = None  # without effect


class InputBody(PooledBody):
    """POST /classify: texts, or token ids, as completions take prompts."""

    input: str | list[Any]
    add_special_tokens: bool = True


class EmbeddingBody(InputBody):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    use_activation: bool | None = Field(
        default=None, validation_alias=AliasChoices("use_activation", "normalize")
    )


class PoolingBody(EmbeddingBody):
    """POST /pooling: whatever the model is served for, which `task` may name."""

    task: Task | None = None


class ScoreBody(PooledBody):
    """POST /score: one text against many, or one by one."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str


class RerankBody(PooledBody):
    """POST /rerank: documents in the order in which they fit the query."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool = True
