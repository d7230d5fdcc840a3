"""The kinds of clusters, by name; nothing heavy is imported for them."""

TARGETS = {
    "slurm": "SLURM, by sbatch",
    "ssh": "a list of hosts, by OpenSSH",
    "mpi": "mpirun and a hostfile",
}
"""The name of each target, which is its file's, and what it is."""
