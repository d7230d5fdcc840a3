"""What `flatout data convert` writes: a file per target format."""
