"""Looking at files before anything is trained: what is in them, how fast, and what to do."""
