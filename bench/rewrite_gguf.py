"""Rewrites a GGUF file with its matrices in another type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter


def rewrite(source: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """Dequantize and requantize every matrix with the gguf package; vectors are unchanged."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, stored = np.asarray(tensor.data), tensor.tensor_type
        if len(tensor.shape) > 1:
            wide = gguf.dequantize(data, stored)
            data, stored = gguf.quantize(wide, kind), kind
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
