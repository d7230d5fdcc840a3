"""Reports of a collective that does not end: the rank that others wait for, and its stack."""
