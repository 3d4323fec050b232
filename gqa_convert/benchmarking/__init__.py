"""Decode latency, throughput, prefill and the live K/V cache of a model and of itself with other numbers of K/V heads."""

from gqa_convert.benchmarking.benchmark import benchmark_model
from gqa_convert.benchmarking.options import BenchmarkOptions

__all__ = ["BenchmarkOptions", "benchmark_model"]
