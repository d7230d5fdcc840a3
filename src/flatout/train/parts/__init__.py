"""What acts around a step: a file for each Part. `order.py` says which acts around which."""
