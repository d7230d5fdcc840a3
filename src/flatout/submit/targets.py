"""The kinds of clusters, by name; nothing heavy is imported for them."""

TARGETS = {
    "slurm": "SLURM, by sbatch",
    "ssh": "a list of hosts, by OpenSSH",
    "mpi": "mpirun and a hostfile",
    "kubernetes": "TrainJobs of Kubeflow, or PyTorchJobs",
    "sagemaker": "training jobs of Amazon SageMaker",
    "ray": "a Ray cluster, by its job server",
}
"""The name of each target, which is its file's, and what it is."""
