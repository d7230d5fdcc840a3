"""Steps and evaluations as graphs of operators: compiled graphs on a CPU, and CUDA graphs."""
