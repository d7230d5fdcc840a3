"""Each rank holds a part of every parameter, of its gradient and of the optimizer's state."""
