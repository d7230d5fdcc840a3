"""Writers of `flatout data convert`, in a file per target format."""
