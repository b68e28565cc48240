"""Plans -> tensors -> tokens: the rows on the device, the paged caches, the step itself."""
