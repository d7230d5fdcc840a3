"""Random changes of images, and blends of the samples of a batch."""
