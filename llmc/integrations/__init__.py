"""llmc inside other systems. Each module needs the package that it is named after."""
