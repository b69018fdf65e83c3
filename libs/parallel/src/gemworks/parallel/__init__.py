"""Topology-aware five-dimensional parallelism for large recommenders."""

from gemworks.parallel.cluster import COLLECTIVES, TIERS, ClusterSpec, Collective, Gpu, Link, Rate, Tier
from gemworks.parallel.costs import CollectiveCost, GroupShape, collective_cost, edge_bytes
from gemworks.parallel.layout import Layout
from gemworks.parallel.meshes import Meshes, build_meshes
from gemworks.parallel.placement import PlacedView, Placement, Traffic, default_traffic, place
from gemworks.parallel.plan import DensePlan, ExpertPlan, ParallelPlan, SparsePlan

__all__ = [
    "COLLECTIVES",
    "TIERS",
    "ClusterSpec",
    "Collective",
    "CollectiveCost",
    "DensePlan",
    "ExpertPlan",
    "Gpu",
    "GroupShape",
    "Layout",
    "Link",
    "Meshes",
    "ParallelPlan",
    "PlacedView",
    "Placement",
    "Rate",
    "SparsePlan",
    "Tier",
    "Traffic",
    "build_meshes",
    "collective_cost",
    "default_traffic",
    "edge_bytes",
    "place",
]
