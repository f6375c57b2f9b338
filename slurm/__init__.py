"""Batch jobs in plain Python: typed specs, scripts, idempotent submission and one watcher, on Slurm or on this machine.

    scheduler = SlurmScheduler()                        # slurm.cluster, or LocalScheduler(root) in slurm.local
    spec = JobSpec(payload=("python", "train.py"), environment="project", nodes=2)        # slurm.spec
    ensure_submitted(scheduler, spec, JobFolder(path), name, guard=guard, grace=grace)    # slurm.submission
    outcome = await Watcher(scheduler).wait(JobFolder(path), on_change)                   # slurm.watcher

Nothing is imported here, so that importing one module costs that module only.
"""
