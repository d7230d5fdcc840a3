"""Jobs on clusters: the work of `flatout run`, written as files for a cluster and sent there.

A Job (job.py) is made of the user's options (job_options.py), its code (code.py) and its inputs
(inputs.py). target.py has the interface to each kind of cluster. A file per cluster writes
artifacts and communicates with it (kubernetes_manifests.py, sagemaker_request.py and ray_driver.py
hold the artifacts of three). send.py writes the folder and sends it once, with ledger.py. watch.py
follows sent jobs.
"""

from flatout.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
