"""Plans -> tensors -> tokens: the rows that live on the device, the paged caches, the step itself."""
