"""Each rank has some layers of the model, and micro-batches pass from rank to rank."""
