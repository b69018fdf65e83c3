"""Topology-aware five-dimensional parallelism for large recommenders."""

from gemworks.parallel.cluster import COLLECTIVES, TIERS, ClusterSpec, Collective, Gpu, Link, Rate, Tier
from gemworks.parallel.costs import CollectiveCost, GroupShape, collective_cost, edge_bytes
from gemworks.parallel.describe import Description, describe
from gemworks.parallel.embeddings import FeatureSpec, FullyShardedEmbeddings
from gemworks.parallel.experts import EnsembleExperts, ExpertExchange
from gemworks.parallel.fsdp import FsdpPolicy, apply_fsdp
from gemworks.parallel.layout import Layout
from gemworks.parallel.lengths import CostModel, LengthLaw, fit_cost_model
from gemworks.parallel.meshes import Meshes, build_meshes
from gemworks.parallel.placement import PlacedView, Placement, Traffic, default_traffic, place
from gemworks.parallel.plan import DensePlan, ExpertPlan, ParallelPlan, SparsePlan
from gemworks.parallel.planner import SearchResult, search
from gemworks.parallel.profile import LayerProfile, ModelProfile
from gemworks.parallel.shuffler import BaseBatchShuffler
from gemworks.parallel.simulation import Simulation, simulate
from gemworks.parallel.sparse_optim import RowSGD, RowWiseAdagrad
from gemworks.parallel.step_graph import SimulationConfig
from gemworks.parallel.tables import TableSpec

__all__ = [
    "COLLECTIVES",
    "TIERS",
    "BaseBatchShuffler",
    "ClusterSpec",
    "Collective",
    "CollectiveCost",
    "CostModel",
    "DensePlan",
    "Description",
    "EnsembleExperts",
    "ExpertExchange",
    "ExpertPlan",
    "FeatureSpec",
    "FsdpPolicy",
    "FullyShardedEmbeddings",
    "Gpu",
    "GroupShape",
    "LayerProfile",
    "Layout",
    "LengthLaw",
    "Link",
    "Meshes",
    "ModelProfile",
    "ParallelPlan",
    "PlacedView",
    "Placement",
    "Rate",
    "RowSGD",
    "RowWiseAdagrad",
    "SearchResult",
    "Simulation",
    "SimulationConfig",
    "SparsePlan",
    "TableSpec",
    "Tier",
    "Traffic",
    "apply_fsdp",
    "build_meshes",
    "collective_cost",
    "default_traffic",
    "describe",
    "edge_bytes",
    "fit_cost_model",
    "place",
    "search",
    "simulate",
]
