"""The key-value cache's bookkeeping: blocks, block tables, prefix cache, swap."""
