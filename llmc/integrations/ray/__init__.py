"""llmc on Ray (https://docs.ray.io): the server as a Serve application, batches in Ray Data.

docs/ray.md shows how to use them. Ray is installed by the extra `ray`, and is imported only if a
cluster is needed.
"""

from llmc.integrations.ray.data import LLMPredictor
from llmc.integrations.ray.serve import app, build_app

__all__ = ["LLMPredictor", "app", "build_app"]
