"""The kinds of clusters by name, apart from their code so that `flatout --help` loads nothing."""

TARGETS = {
    "slurm": "SLURM, by sbatch",
    "ssh": "a list of hosts, by OpenSSH",
    "mpi": "mpirun and a hostfile",
    "kubernetes": "TrainJobs of Kubeflow",
    "sagemaker": "training jobs of Amazon SageMaker",
    "ray": "a Ray cluster, by its job server",
}
"""The name of each target, which is its file's, and a description."""
