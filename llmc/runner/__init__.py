"""Plans -> tensors -> tokens: rows on the device, paged caches, and running the step."""
