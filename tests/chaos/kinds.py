"""All faults that strike runs of the light toolchain."""

from tests.chaos import acts_on_clusters, acts_on_flows

KINDS = (*acts_on_flows.KINDS, *acts_on_clusters.KINDS)
