"""What runs: which rows form which batch, what they become, who makes them, where they are kept."""
