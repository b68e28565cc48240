"""Request bodies of the routes that return vectors and scores, with the field names of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from llmc.engine.admission import MAX_CACHE_SALT
from llmc.pooling import Task
from llmc.server.protocol import Body, Int64

MAX_INPUTS = 2048  # texts per call; OpenAI's clients split larger inputs at this size
MAX_TOKEN_VALUES = MAX_INPUTS * 4096  # in a response with a vector per token

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
    """The fields that they all share."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = _CHAT

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None
    priority: Int64 = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT)] | None = None
    user: Any = None  # ignored


class InputBody(PooledBody):
    """POST /classify: texts or token ids, in the same forms as a completion's prompt."""

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
    """POST /pooling: the task that the model is served for; `task`, if given, must match it."""

    task: Task | None = None


class ScoreBody(PooledBody):
    """POST /score: one text against many, or pairs of texts."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str


class RerankBody(PooledBody):
    """POST /rerank: documents sorted by relevance to the query."""

    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool = True
