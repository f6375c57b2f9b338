"""The outside world as the Prefect UI edits it: clusters, the Neuron toolchain, the Hub, S3."""

from blocks.clusters import BrokenClusterFile, Cluster, LocalCluster, SlurmCluster, recall, remember
from blocks.sources import HuggingFaceHub, S3Storage
from blocks.toolchain import NeuronToolchain

__all__ = [
    "BrokenClusterFile",
    "Cluster",
    "HuggingFaceHub",
    "LocalCluster",
    "NeuronToolchain",
    "S3Storage",
    "SlurmCluster",
    "recall",
    "remember",
]
