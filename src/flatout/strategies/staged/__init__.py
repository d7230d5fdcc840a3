"""Pipeline parallelism: each rank has some layers of the model, and passes micro-batches on."""
