"""`slipstream submit`: the job of a run on a cluster, as a batch script for Slurm or as a manifest for KubeRay."""
